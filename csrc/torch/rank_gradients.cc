#include "torch/rank_gradients.h"

#include <algorithm>
#include <string>

#include "core/units.h"
#include "torch/gil.h"

namespace castor {
namespace {

/// So many chunks may wait to be reduced before backward does.
constexpr std::size_t kMostWaiting = 4;
/// For ranks that are slower; one that has stopped or does something else must not stop this one
/// before it comes to where they meet.
constexpr std::chrono::milliseconds kPatience{250};

std::size_t largest_gradients(const ChunkLayout& layout) {
  std::size_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    largest = std::max(largest, chunk.trainable ? chunk.used_bytes : 0);
  }
  return largest;
}

}  // namespace

RankGradients::RankGradients(std::shared_ptr<Collectives> ranks, RankMeeting& meeting,
                             const ChunkLayout& layout, GradientSink& gradients,
                             const SharedHomes* homes, DeviceStaging staging, Executor& executor,
                             MemoryTier& host)
    : ranks_(std::move(ranks)),
      meeting_(meeting),
      layout_(layout),
      gradients_(gradients),
      homes_(homes),
      host_(host),
      reduction_(
          *ranks_, homes, executor,
          host.allocate(RankReduction::window_bytes(largest_gradients(layout), ranks_->size()),
                        "gradients pass through it from rank to rank; raise host_memory"),
          figures_, std::move(staging)),
      handed_(layout.chunks().size(), false),
      copies_(layout.chunks().size()) {
  if (homes_ == nullptr) {
    return;
  }
  // Backward comes to modules last to first, and chunks hold them in their order.
  std::vector<ChunkId> order;
  for (std::size_t i = layout_.chunks().size(); i-- > 0;) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (const Payload* const payload = gradients_.payload(chunk);
        payload != nullptr && homes_->contains(payload->home())) {
      order.push_back(chunk);
    }
  }
  reductions_ = std::make_unique<BackwardReductions>(ranks_, layout_.chunks().size(),
                                                     std::move(order), [this](ChunkId chunk) {
                                                       gradients_.wait(chunk);
                                                       reduce(chunk);
                                                     });
}

bool RankGradients::at_shared_home(ChunkId chunk) const {
  const Payload* const payload = gradients_.payload(chunk);
  return homes_ != nullptr && payload != nullptr && !payload->away() &&
         homes_->contains(payload->home());
}

void RankGradients::arriving(ChunkId chunk) {
  if (!at_shared_home(chunk)) {
    return;
  }
  if (!std::exchange(begun_, true)) {
    forget_last_step();
  }
  using Progress = BackwardReductions::Progress;
  Progress progress = Progress::kMade;
  while (patient_ && progress == Progress::kMade && reductions_->num_waiting() >= kMostWaiting) {
    progress = reductions_->wait_for_others(kPatience);
    patient_ = progress != Progress::kNone;
  }
  take_copy(chunk);
}

// What was written between backward and step, and nobody can see any more.
void RankGradients::forget_last_step() {
  for (std::size_t i = 0; i < handed_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (at_shared_home(chunk) && !gradients_.seen(chunk)) {
      homes_->forget({gradients_.payload(chunk)->home(), gradients_.payload(chunk)->bytes()});
      drop_copy(chunk);
    }
  }
}

void RankGradients::take_copy(ChunkId chunk) {
  const MutexLock lock(mutex_);
  Reservation& copy = copies_[index(chunk)];
  if (copy.bytes() == 0) {
    copy = host_.ledger().reserve(
        SharedHomes::size_of(layout_.chunk(chunk).used_bytes),
        "a rank has gradients of its own until all ranks have theirs; raise host_memory");
  }
}

void RankGradients::drop_copy(ChunkId chunk) {
  const MutexLock lock(mutex_);
  copies_[index(chunk)].release();
}

void RankGradients::completed(ChunkId chunk, TensorGate& gate) {
  if (synchronised_ && at_shared_home(chunk) && reductions_->complete(chunk)) {
    handed_[index(chunk)] = true;
    gradients_.hand_over(chunk);
    gate.close(gradients_.group(chunk));
  }
}

void RankGradients::wait(ChunkId chunk) {
  if (reductions_) {
    reductions_->wait(chunk);
  }
}

void RankGradients::end_backward(TensorGate& gate) {
  if (synchronised_) {
    average(MeetingPoint::kBackwardEnd, gate);
  }
}

// Ranks that do something else do not come to reduce what this one has handed over.
GradientMarks RankGradients::meet(MeetingPoint point) {
  GradientMarks own = gradients_.marks();
  own.handed = handed_;
  try {
    return meeting_.meet(point, own);
  } catch (...) {
    ranks_->leave();
    throw;
  }
}

void RankGradients::average(MeetingPoint point, TensorGate& gate) {
  const GilRelease released;
  const RankFigures::Timed timed(figures_);
  const GradientMarks all = meet(point);
  std::vector<bool> reduced(all.fresh.size(), false);
  if (reductions_ && point == MeetingPoint::kBackwardEnd) {
    reduced = reductions_->end_pass();
  }
  for (std::size_t i = 0; i < all.fresh.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (!all.fresh[i] && !all.handed[i]) {
      continue;
    }
    gate.pass(gradients_.group(chunk));  // the last update has read them, and copies have arrived
    if (!all.fresh[i] && reduced[i]) {
      continue;
    }
    if (at_shared_home(chunk)) {
      take_copy(chunk);
    }
    for (const ParamId param : layout_.chunk(chunk).params) {
      if (all.present[index(param)]) {
        gradients_.make_present(param, all.scale.value_or(1.0));
      }
    }
    gradients_.average(chunk, [&](const Payload&) { reduce(chunk); });
  }
  handed_.assign(handed_.size(), false);
  begun_ = false;
  patient_ = true;
}

void RankGradients::reduce(ChunkId chunk) {
  reduction_.reduce(*gradients_.payload(chunk), layout_.chunk(chunk).type);
  drop_copy(chunk);
}

}  // namespace castor
