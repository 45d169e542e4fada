#include "store/rank_gradients.h"

#include <algorithm>
#include <string>

#include "core/units.h"
#include "ranks/piece_norms.h"

namespace castor {
namespace {

/// So many chunks may wait to be reduced before backward does.
constexpr std::size_t kMostWaiting = 4;
/// For ranks that are slower; one that has stopped or does something else must not stop this one
/// before it comes to the next check of the ranks.
constexpr std::chrono::milliseconds kPatience{250};

std::size_t largest_gradients(const ChunkLayout& layout) {
  std::size_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    largest = std::max(largest, chunk.trainable ? chunk.used_bytes : 0);
  }
  return largest;
}

}  // namespace

RankGradients::RankGradients(std::shared_ptr<Collectives> ranks,
                             std::shared_ptr<DeviceReduction> sums, ConsistencyCheck& consistency,
                             const ChunkLayout& layout, Places places, Executor& executor,
                             MemoryTier& host, MemoryTier& device)
    : ranks_(std::move(ranks)),
      sums_(std::move(sums)),
      consistency_(consistency),
      layout_(layout),
      gradients_(places.gradients),
      shared_storage_(places.storage),
      gradient_shards_(places.gradient_shards),
      shards_(places.shards),
      executor_(executor),
      host_(host),
      reduction_(*ranks_, shared_storage_, executor,
                 host.allocate(RankReduction::window_bytes(
                                   largest_gradients(layout), ranks_->size(),
                                   shared_storage_ == nullptr ? 1 : ranks_->node()->size(),
                                   reduced_on(sums_.get())),
                               "gradients pass through it from rank to rank; raise host_memory"),
                 figures_, std::move(places.staging), sums_.get()),
      handed_(layout.chunks().size(), false),
      fences_(layout.chunks().size()),
      copies_(layout.chunks().size()) {
  if (sums_) {
    device_window_ =
        device.allocate(sums_->window_bytes(largest_gradients(layout)),
                        "gradients pass through it from device to device; raise device_memory, or "
                        "give reduce_on='host'");
    sums_->use_window({device_window_.data(), device_window_.bytes()});
    std::vector<bool> gathers(layout_.chunks().size());
    for (std::size_t i = 0; i < gathers.size(); ++i) {
      gathers[i] = may_gather(ChunkId{static_cast<std::uint32_t>(i)});
    }
    gathered_ =
        std::make_unique<DeviceGradients>(layout_, gathers, device, std::move(places.copies));
    gradients_.gather_in(gathered_.get());
  }
  ranks_->set_place("");  // beside a pass, at whose end ranks compare marks
  if (shared_storage_ == nullptr && gradient_shards_ == nullptr && !sums_) {
    return;
  }
  // Backward comes to modules last to first, and chunks hold them in their order. Any may become
  // resident on the device later.
  std::vector<ChunkId> order;
  for (std::size_t i = layout_.chunks().size(); i-- > 0;) {
    if (const ChunkId chunk{static_cast<std::uint32_t>(i)};
        copied(chunk) || (sums_ && gradients_.payload(chunk) != nullptr)) {
      order.push_back(chunk);
    }
  }
  reductions_ = std::make_unique<BackwardReductions>(
      ranks_, layout_.chunks().size(), std::move(order), [this](ChunkId chunk) {
        gradients_.wait_beside(chunk);
        std::exchange(fences_[index(chunk)], nullptr)->wait();
        reduce(chunk);
      });
}

RankGradients::~RankGradients() {
  if (sums_ && reductions_ && reductions_->under_way()) {
    sums_->leave();  // the reductions' thread may wait for ranks that do not come
  }
  gradients_.gather_in(nullptr);
}

bool RankGradients::in_shared_host_storage(ChunkId chunk) const {
  const Payload* const payload = gradients_.payload(chunk);
  return shared_storage_ != nullptr && payload != nullptr && !payload->away() &&
         shared_storage_->contains(payload->storage());
}

bool RankGradients::added_on_device(ChunkId chunk) const {
  const Payload* const payload = gradients_.payload(chunk);
  return sums_ && payload != nullptr && payload->tier() == TierKind::kDevice;
}

bool RankGradients::may_gather(ChunkId chunk) const {
  const Payload* const payload = gradients_.payload(chunk);
  return sharded(chunk) || (payload != nullptr && payload->tier() == TierKind::kHost);
}

template <typename Full>
void RankGradients::wait_for_others_while(const Full& full) {
  using Progress = BackwardReductions::Progress;
  Progress progress = Progress::kMade;
  while (patient_ && progress == Progress::kMade && full()) {
    progress = reductions_->wait_for_others(kPatience);
    patient_ = progress != Progress::kNone;
  }
}

bool RankGradients::begin_gathering(ChunkId chunk, OperatorGate& gate) {
  const bool has_full_copy =
      sharded(chunk) ? gradient_shards_->has_copy(chunk)
                     : in_shared_host_storage(chunk) && gradients_.payload(chunk)->has_copy();
  if (!synchronised_ || handed_[index(chunk)] || has_full_copy || !may_gather(chunk) ||
      gradients_.in_several_passes(chunk) || gradients_.seen(chunk)) {
    return false;
  }
  gate.pass(gradient_group(layout_, chunk));  // the last update may still read what will be written
  gradients_.leave_to_holders(chunk);
  if (sharded(chunk)) {
    gradient_shards_->drop_copy(chunk);  // that somebody has only read
  }
  bool begun = false;
  wait_for_others_while([&] {
    begun = gathered_->begin(chunk);
    return !begun;
  });
  begun = begun || gathered_->begin(chunk);
  if (begun) {
    gate.close(gradient_group(layout_, chunk));  // whoever reads them moves them to the host
  }
  return begun;
}

void RankGradients::arriving(ChunkId chunk, OperatorGate& gate) {
  if (gathering(chunk) || (!copied(chunk) && !(gathered_ && may_gather(chunk)))) {
    return;
  }
  if (!std::exchange(begun_, true)) {
    forget_last_step(gate);
  }
  if ((gathered_ && begin_gathering(chunk, gate)) || !copied(chunk)) {
    return;
  }
  wait_for_others_while([this] { return reductions_->num_waiting() >= kMostWaiting; });
  if (!sharded(chunk) && has_copy(chunk)) {
    return;
  }
  gate.pass(gradient_group(layout_, chunk));  // the last update may still read what it will hide
  gradients_.leave_to_holders(chunk);
  for (;;) {
    const std::size_t num_taken = reductions_->num_taken();
    try {
      begin_copy(chunk);
      return;
    } catch (const OutOfMemory&) {
      // The last copy that waited may have been freed since it was tried.
      if (!reductions_->wait_for_next() && reductions_->num_taken() == num_taken) {
        throw;
      }
    }
  }
}

void RankGradients::begin_copy(ChunkId chunk) {
  if (!sharded(chunk) && copied_as_block(chunk)) {
    gradients_.payload(chunk)->take_copy(gradients_.seen(chunk) ? Payload::CopyContents::kStorage
                                                                : Payload::CopyContents::kZeros);
    return;
  }
  take_copy(chunk);
  if (!sharded(chunk) && !gradients_.seen(chunk)) {
    shared_storage_->begin_copy(
        {gradients_.payload(chunk)->host_storage(), gradients_.payload(chunk)->bytes()});
  }
}

// What was written between backward and step, and nobody can see any more.
void RankGradients::forget_last_step(OperatorGate& gate) {
  for (std::size_t i = 0; i < handed_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (copied(chunk)) {
      gradients_.leave_to_holders(chunk);
    }
    if (!copied(chunk) || gradients_.seen(chunk)) {
      continue;
    }
    if (in_shared_host_storage(chunk) && copied_as_block(chunk)) {
      if (gradients_.payload(chunk)->has_copy()) {
        gate.pass(gradient_group(layout_, chunk));  // the last update may still read it
        gradients_.fence()->wait();                 // and so may kernels
        gradients_.payload(chunk)->drop_copy();
      }
      continue;
    }
    if (in_shared_host_storage(chunk)) {
      shared_storage_->forget(
          {gradients_.payload(chunk)->host_storage(), gradients_.payload(chunk)->bytes()});
    } else if (gradient_shards_->has_copy(chunk)) {
      gate.pass(gradient_group(layout_, chunk));  // the last update may still read it
    }
    drop_copy(chunk);
  }
}

bool RankGradients::has_copy(ChunkId chunk) {
  if (copied_as_block(chunk)) {
    return gradients_.payload(chunk)->has_copy();
  }
  const MutexLock lock(mutex_);
  return copies_[index(chunk)].bytes() > 0;
}

void RankGradients::take_copy(ChunkId chunk) {
  if (sharded(chunk)) {
    gradient_shards_->take_copy(chunk, gradients_.contents_of_copy(chunk));
    return;
  }
  const MutexLock lock(mutex_);
  if (copied_as_block(chunk)) {
    gradients_.payload(chunk)->take_copy(Payload::CopyContents::kStorage);
    return;
  }
  Reservation& copy = copies_[index(chunk)];
  if (copy.bytes() == 0) {
    copy = pay_for_copy(chunk);
  }
}

Reservation RankGradients::pay_for_copy(ChunkId chunk) {
  return host_.ledger().reserve(
      SharedHostStorage::size_of(layout_.chunk(chunk).used_bytes),
      "a rank has gradients of its own until all ranks have theirs; raise host_memory");
}

void RankGradients::writing_all() {
  const MutexLock lock(mutex_);
  std::vector<Reservation> taken(copies_.size());  // given back where one finds no room
  std::vector<Payload*> copied;                    // likewise
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const auto& params = layout_.chunk(chunk).params;
    const bool any = std::any_of(params.begin(), params.end(),
                                 [this](ParamId param) { return gradients_.present(param); });
    if (!any || !in_shared_host_storage(chunk)) {
      continue;
    }
    Payload* const payload = gradients_.payload(chunk);
    if (!copied_as_block(chunk) && copies_[i].bytes() == 0) {
      taken[i] = pay_for_copy(chunk);
    } else if (copied_as_block(chunk) && !payload->has_copy()) {
      try {
        payload->take_copy(Payload::CopyContents::kStorage);
      } catch (...) {
        for (Payload* const one : copied) {
          one->drop_copy();
        }
        throw;
      }
      copied.push_back(payload);
    }
  }
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    if (taken[i].bytes() > 0) {
      copies_[i] = std::move(taken[i]);
    }
  }
}

void RankGradients::drop_copy(ChunkId chunk) {
  if (sharded(chunk)) {
    gradient_shards_->drop_copy(chunk);
    return;
  }
  const MutexLock lock(mutex_);
  copies_[index(chunk)].release();
}

void RankGradients::completed(ChunkId chunk, OperatorGate& gate) {
  if (!synchronised_ || !reduced_beside_backward(chunk) || handed_[index(chunk)]) {
    return;
  }
  if (gathering(chunk) && !gathered_->complete(chunk)) {
    gate.pass(gradient_group(layout_, chunk));  // what is not there has come to the host
  }
  fences_[index(chunk)] = gradients_.fence();
  if (reductions_->complete(chunk)) {
    handed_[index(chunk)] = true;
    gradients_.hand_over(chunk);
    gate.close(gradient_group(layout_, chunk));
  }
}

void RankGradients::wait(ChunkId chunk) {
  if (reductions_) {
    ranks_->set_place("is in a backward pass that reads the mean of gradients");
    reductions_->wait(chunk);
    ranks_->set_place("");
  }
}

void RankGradients::settle(ChunkId chunk) {
  wait(chunk);
  if (!gathered_) {
    return;
  }
  gathered_->move_to_host(chunk, [this, chunk] {
    if (sharded(chunk)) {
      gradient_shards_->take_copy(chunk, GradientShards::Contents::kZeros);
      return gradient_shards_->copy(chunk);
    }
    if (in_shared_host_storage(chunk)) {
      const MutexLock lock(mutex_);
      gradients_.payload(chunk)->take_copy(Payload::CopyContents::kZeros);
    }
    return gradients_.payload(chunk)->data();
  });
}

void RankGradients::end_backward(OperatorGate& gate) {
  if (synchronised_) {
    average(SyncPoint::kBackwardEnd, gate);
  }
}

// Ranks that do something else do not come to reduce what this one has handed over.
GradientMarks RankGradients::check_ranks(SyncPoint point, std::optional<std::size_t> optimizer) {
  GradientMarks own = gradients_.marks();
  own.handed = handed_;
  return or_leave(*ranks_, [&] { return consistency_.check(point, own, optimizer); });
}

void RankGradients::average(SyncPoint point, OperatorGate& gate,
                            std::optional<std::size_t> optimizer) {
  const RankFigures::Timed timed(figures_);
  const GradientMarks all = check_ranks(point, optimizer);
  std::vector<bool> reduced(all.fresh.size(), false);
  if (reductions_ && point == SyncPoint::kBackwardEnd) {
    reduced = reductions_->end_pass();
  }
  for (std::size_t i = 0; i < all.fresh.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (!all.fresh[i] && !all.handed[i]) {
      continue;
    }
    gate.pass(
        gradient_group(layout_, chunk));  // the last update has read them, and copies have arrived
    if (!all.fresh[i] && reduced[i]) {
      continue;
    }
    if (copied(chunk)) {
      take_copy(chunk);
    }
    for (const ParamId param : layout_.chunk(chunk).params) {
      if (all.present[index(param)]) {
        gradients_.make_present(param, all.scale.value_or(1.0));
      }
    }
    gradients_.average(chunk, [&] { reduce(chunk); });
  }
  handed_.assign(handed_.size(), false);
  begun_ = false;
  patient_ = true;
}

void RankGradients::reduce(ChunkId chunk) {
  using From = DeviceReduction::From;
  const ScalarType type = layout_.chunk(chunk).type;
  const std::span<const std::byte> gathered =
      gathered_ ? gathered_->values(chunk) : std::span<const std::byte>();
  if (sharded(chunk)) {
    gradient_shards_->reduce(
        chunk, [&](std::span<const std::byte> copy, std::span<std::byte> shard) {
          reduction_.reduce_scatter(gathered.empty() ? copy : gathered,
                                    gathered.empty() ? From::kHost : From::kDevice, shard, type);
        });
  } else {
    reduction_.reduce(*gradients_.payload(chunk), type, gathered);
    drop_copy(chunk);
  }
  if (!gathered.empty()) {
    gathered_->release(chunk, gathered.size() / ranks_->size());
  }
}

// Gradients that some parameters lack count as well, so that all ranks have the same pieces.
void RankGradients::measure_shards(std::span<double> squares) {
  const RankFigures::Timed timed(figures_);
  std::vector<std::size_t> params;
  std::vector<GradientPiece> pieces;
  std::size_t num_cuts = 0;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (!sharded(chunk)) {
      continue;
    }
    const std::byte* const shard = gradient_shards_->shard(chunk);
    for (const ParamId param : layout_.chunk(chunk).params) {
      const ParamSpec& spec = layout_.param(param);
      const Piece piece = shards_.piece(param);
      const std::size_t begin = piece.numel == 0 ? 0
                                                 : layout_.place(param).offset +
                                                       piece.first_element - shards_.first(chunk);
      params.push_back(index(param));
      pieces.push_back({.data = shard + begin * size_of(spec.type),
                        .first_element = piece.first_element,
                        .numel = piece.numel,
                        .whole_numel = spec.numel,
                        .type = spec.type,
                        .cut = num_cuts});
    }
    ++num_cuts;
  }
  const std::vector<double> sums = square_norms(*ranks_, executor_, pieces, num_cuts, figures_);
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (gradients_.present(ParamId{static_cast<std::uint32_t>(params[i])})) {
      squares[params[i]] += sums[i];
    }
  }
}

}  // namespace castor
