#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/collectives.h"
#include "core/memory_tier.h"
#include "core/rank_meeting.h"
#include "torch/gradient_sink.h"
#include "torch/tensor_gate.h"

namespace castor {

/// What this rank sent to others, and how long it was busy with them.
struct RankFigures {
  std::uint64_t bytes_sent = 0;
  std::uint64_t nanoseconds = 0;  ///< waiting for other ranks included
};

/// Makes the gradients of several ranks their mean, on every rank: at the end of a backward pass,
/// or later where passes are not to be synchronised, but before the step. Each rank adds up its
/// part of every chunk, in rank order, and all gather the parts: 2 (n-1)/n of the gradients' bytes
/// are sent, and one window of memory is needed. Owned by the session; used by the one thread at a
/// time that runs backward and step.
class RankGradients {
 public:
  /// Meets the others; takes the window from `host`. Throws OutOfMemory; UsageError where they have
  /// other chunks. All but `ranks` outlive this.
  RankGradients(std::shared_ptr<Collectives> ranks, const ChunkLayout& layout,
                GradientSink& gradients, Executor& executor, MemoryTier& host);

  /// Whether the passes that follow are synchronised at their end.
  void synchronise(bool on) noexcept { synchronised_ = on; }
  /// The outermost backward pass is over.
  void end_backward(TensorGate& gate);
  /// Before a step, which may not be taken with gradients that the others do not have.
  void begin_step(TensorGate& gate) { average(MeetingPoint::kStep, gate); }
  void end_step() noexcept { meeting_.end_step(); }

  [[nodiscard]] std::size_t rank() const noexcept { return ranks_->rank(); }
  [[nodiscard]] std::size_t size() const noexcept { return ranks_->size(); }
  [[nodiscard]] const RankFigures& figures() const noexcept { return figures_; }

 private:
  void average(MeetingPoint point, TensorGate& gate);
  void average(std::span<std::byte> gradients, ScalarType type);

  const std::shared_ptr<Collectives> ranks_;
  const ChunkLayout& layout_;
  GradientSink& gradients_;
  Executor& executor_;
  RankMeeting meeting_;
  Block window_;
  bool synchronised_ = true;
  RankFigures figures_;
};

}  // namespace castor
