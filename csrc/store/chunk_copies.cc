#include "store/chunk_copies.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/units.h"
#include "parallel/idle_thread.h"

namespace castor {

ChunkCopies::ChunkCopies(const ChunkLayout& layout, const ShardMap& shards,
                         const StateStore& places, Executor& executor, Ledger& host,
                         ChunkReads& reads)
    : layout_(layout),
      shards_(shards),
      places_(places),
      executor_(executor),
      host_(host),
      reads_(reads),
      arena_(
          std::make_shared<MmapArena>(std::make_unique<OsPages>(OsPages::Discard::kWhereNeeded))),
      copies_(layout.chunks().size()) {}

std::vector<ChunkCopies::Part> ChunkCopies::parts(ChunkId chunk, bool states) const {
  const std::size_t size = size_of(layout_.chunk(chunk).type);
  const Payload& weights = places_.weights(chunk);
  std::vector<Part> parts{
      {.kind = PayloadKind::kParam,
       .bytes = {weights.data() + shards_.first(chunk) * size, shards_.numel(chunk) * size}}};
  if (states) {
    for (const PayloadKind kind : places_.kinds(chunk)) {
      const Payload& payload = places_.payload(chunk, kind);
      parts.push_back({.kind = kind, .bytes = {payload.data(), payload.bytes()}});
    }
  }
  return parts;
}

bool ChunkCopies::take_memory(Copy& copy, std::size_t bytes) {
  std::optional<Reservation> taken = host_.try_reserve(bytes);
  if (!taken) {
    return false;
  }
  if (copy.bytes < bytes) {
    copy.memory.reset();
    copy.bytes = 0;
    try {
      copy.memory = {arena_->allocate(bytes), [arena = arena_, bytes](std::byte* memory) {
                       arena->deallocate(memory, bytes);
                     }};
    } catch (const OutOfMemory&) {
      return false;
    }
    copy.bytes = bytes;
  }
  copy.taken = *std::move(taken);
  return true;
}

std::size_t ChunkCopies::begin(std::span<const ChunkId> chunks, bool states, std::size_t most) {
  const std::size_t room = std::min(most, host_.available() / 2);
  std::size_t left = room;
  for (const ChunkId chunk : chunks) {
    if (places_.partly_stored(chunk) || places_.sharded(chunk)) {
      continue;
    }
    const std::vector<Part> all = parts(chunk, states);
    std::size_t bytes = 0;
    for (const Part& part : all) {
      bytes += align_up(part.bytes.size(), kParamAlignment);
    }
    Copy& copy = copies_[index(chunk)];
    if (bytes == 0 || bytes > left || !take_memory(copy, bytes)) {
      continue;
    }
    left -= bytes;
    auto work = std::make_shared<PiecewiseCopy>();
    std::byte* target = copy.memory.get();
    copy.begins.fill(std::nullopt);
    for (const Part& part : all) {
      copy.begins[static_cast<std::size_t>(part.kind)] = target - copy.memory.get();
      if (places_.on_device(chunk)) {
        places_.device().backend().copy_from_device(part.bytes, target);
      } else {
        work->add(part.bytes, target);
      }
      target += align_up(part.bytes.size(), kParamAlignment);
    }
    const MutexLock lock(mutex_);
    copy.work = std::move(work);
  }
  return room - left;
}

std::shared_ptr<PiecewiseCopy> ChunkCopies::work_of(ChunkId chunk) {
  const MutexLock lock(mutex_);
  return copies_[index(chunk)].work;
}

bool ChunkCopies::finish(ChunkId chunk) {
  const std::shared_ptr<PiecewiseCopy> work = work_of(chunk);
  if (work) {
    work->finish(&executor_);
  }
  return work != nullptr;
}

void ChunkCopies::finish_all() {
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (const std::shared_ptr<PiecewiseCopy> work = work_of(chunk)) {
      where_idle([&] { work->finish(nullptr); });
      reads_.end(chunk);
    }
  }
}

bool ChunkCopies::any_awaited() const noexcept {
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    if (!copies_[i].made() && reads_.reading(ChunkId{static_cast<std::uint32_t>(i)})) {
      return true;
    }
  }
  return false;
}

ChunkCopies::Bytes ChunkCopies::piece(ParamId param, PayloadKind kind) const {
  const ParamPlace place = layout_.place(param);
  const Copy& copy = copies_[index(place.chunk)];
  const Piece own = shards_.piece(param);
  // An empty piece may lie anywhere in the chunk.
  const std::size_t before =
      own.numel == 0 ? 0 : place.offset + own.first_element - shards_.first(place.chunk);
  const std::size_t begin =
      copy.begins[static_cast<std::size_t>(kind)].value() + places_.bytes(param, kind, before);
  return {.data = {copy.memory, copy.memory.get() + begin},
          .size = places_.bytes(param, kind, own.numel)};
}

void ChunkCopies::end() {
  {
    const MutexLock lock(mutex_);
    for (Copy& copy : copies_) {
      copy.work.reset();
      if (copy.made()) {
        arena_->discard(copy.memory.get(), copy.bytes);
        copy.taken.release();
      }
    }
  }
  reads_.end_all();
}

}  // namespace castor
