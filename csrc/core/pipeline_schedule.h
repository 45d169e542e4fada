#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace castor {

/// Order in which the ranks of a pipeline run micro-batches (docs/design/0034, 0040).
enum class PipelineStyle : std::uint8_t {
  k1f1b,         ///< one forward, one backward (Narayanan et al. 2019, PipeDream)
  kGpipe,        ///< all forwards, then all backwards (Huang et al. 2019)
  kInterleaved,  ///< 1F1B over several stages of each rank (Narayanan et al. 2021, section 2.2)
  kZbv,          ///< two stages a rank on a V, weights' gradients later (Qi et al. 2023, section 6)
};

[[nodiscard]] constexpr std::string_view to_string(PipelineStyle style) noexcept {
  switch (style) {
    case PipelineStyle::k1f1b: return "1f1b";
    case PipelineStyle::kGpipe: return "gpipe";
    case PipelineStyle::kInterleaved: return "interleaved";
    case PipelineStyle::kZbv: return "zbv";
  }
  return "unknown";
}

/// Pass of a micro-batch through a stage.
enum class PipelinePass : std::uint8_t {
  kForward,
  kBackward,   ///< full backward
  kOfInputs,   ///< gradients of the stage's inputs, which the stage before waits for
  kOfWeights,  ///< gradients of the stage's weights, later
};

[[nodiscard]] constexpr std::string_view to_string(PipelinePass pass) noexcept {
  switch (pass) {
    case PipelinePass::kForward: return "forward";
    case PipelinePass::kBackward: return "backward";
    case PipelinePass::kOfInputs: return "of_inputs";
    case PipelinePass::kOfWeights: return "of_weights";
  }
  return "unknown";
}

/// Pass of one micro-batch through one stage.
struct PipelineOp {
  std::uint32_t stage = 0;  ///< number of the stage in the model
  std::uint32_t microbatch = 0;
  PipelinePass pass = PipelinePass::kForward;

  friend bool operator==(const PipelineOp&, const PipelineOp&) = default;
};

/// A model in stages. `stages_per_rank` is 1, except for kInterleaved, and 2 for kZbv. Rank i %
/// num_ranks has stage i; for kZbv rank 0 has the first stage and the last.
struct Pipeline {
  PipelineStyle style = PipelineStyle::k1f1b;
  std::uint32_t num_ranks = 1;
  std::uint32_t stages_per_rank = 1;
  std::uint32_t num_microbatches = 1;
};

/// Returns the passes that a rank runs, in order, as torch.distributed.pipelining's schedules
/// (2.11) run them. Throws InvalidArgument where a number is 0 or does not suit the style, where
/// the pipeline has no such rank, or where kInterleaved's micro-batches are no multiple of its
/// ranks.
[[nodiscard]] std::vector<PipelineOp> pipeline_order(const Pipeline& pipeline, std::uint32_t rank);

/// Seconds that one micro-batch takes in a stage.
struct StageSeconds {
  double forward = 0.0;
  double backward = 0.0;  ///< full backward
  /// Seconds until its hidden states are at the next stage, and as many until its gradients are at
  /// the one before.
  double transfer = 0.0;
  /// Seconds of `backward` that are kOfWeights.
  double of_weights = 0.0;
};

/// Returns the seconds from the first forward to the end of the last backward. Each rank runs its
/// order, one micro-batch at a time. Transfers run beside the compute; there are none between
/// stages of one rank. Throws InvalidArgument as pipeline_order does, and where there is not one
/// entry for each stage, one is negative or not finite, or `of_weights` is more than `backward`.
[[nodiscard]] double pipeline_seconds(const Pipeline& pipeline,
                                      std::span<const StageSeconds> stages);

}  // namespace castor
