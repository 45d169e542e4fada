#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "core/collectives.h"
#include "core/memory_tier.h"
#include "core/rank_meeting.h"
#include "torch/gradient_sink.h"
#include "torch/rank_figures.h"
#include "torch/tensor_gate.h"

namespace castor {

/// Makes the gradients of several ranks their mean, on every rank: at the end of a backward pass,
/// or later where passes are not to be synchronised, but before the step. Each rank adds up its
/// part of every chunk, in rank order, and all gather the parts: 2 (n-1)/n of the gradients' bytes
/// are sent, and one window of memory is needed. Owned by the session; used by the one thread at a
/// time that runs backward and step.
class RankGradients {
 public:
  /// Takes the window from `host`. Throws OutOfMemory. All outlive this.
  RankGradients(Collectives& ranks, RankMeeting& meeting, const ChunkLayout& layout,
                GradientSink& gradients, Executor& executor, MemoryTier& host);

  /// Whether the passes that follow are synchronised at their end; returns whether those before
  /// were.
  bool synchronise(bool on) noexcept { return std::exchange(synchronised_, on); }
  /// The outermost backward pass is over.
  void end_backward(TensorGate& gate);
  /// Before a step, which may not be taken with gradients that the others do not have.
  void begin_step(TensorGate& gate) { average(MeetingPoint::kStep, gate); }
  void end_step() noexcept { meeting_.end_step(); }

  [[nodiscard]] const RankFigures& figures() const noexcept { return figures_; }

 private:
  void average(MeetingPoint point, TensorGate& gate);
  void average(std::span<std::byte> gradients, ScalarType type);

  Collectives& ranks_;
  RankMeeting& meeting_;
  const ChunkLayout& layout_;
  GradientSink& gradients_;
  Executor& executor_;
  Block window_;
  bool synchronised_ = true;
  RankFigures figures_;
};

}  // namespace castor
