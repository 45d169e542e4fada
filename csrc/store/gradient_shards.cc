#include "store/gradient_shards.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

namespace castor {
namespace {

const std::string kSharded =
    "these gradients are sharded over ranks (zero_stage=2 or 3; or were, until their model "
    "was dropped) and have no address. Operators gather them: take a .clone() before "
    "numpy(), data_ptr() or torch.save";
constexpr char kNoRoom[] =
    "a rank has all of a chunk's gradients until all ranks have theirs (all chunks' under "
    "no_sync, and of clip_grad_norm_, where GeminiPlugin(max_norm=...) needs none), and while "
    "p.grad is read; raise host_memory, or make chunks smaller (chunk_bytes)";

}  // namespace

class GradientShards::Visit {
 public:
  Visit(GradientShards& gradients, ChunkId chunk) noexcept : gradients_(gradients), chunk_(chunk) {}
  ~Visit() { gradients_.end_visit(chunk_); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  GradientShards& gradients_;
  const ChunkId chunk_;
};

GradientShards::GradientShards(const ChunkLayout& layout, WeightShards& shards,
                               std::shared_ptr<MemoryTier> host, std::size_t most_kept,
                               const AddressFollower& follower)
    : layout_(layout),
      shards_(shards),
      blocks_(std::move(host), kNoRoom, HostBlocks::Account::kNobody, most_kept),
      follower_(follower),
      chunks_(layout.chunks().size()) {
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (sharded(chunk)) {
      shard_bytes_ += shards_.shard(of(chunk)).size();
    }
  }
}

// Tensors may outlive this, and with it the copies.
GradientShards::~GradientShards() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    follower_.point_at(ChunkId{static_cast<std::uint32_t>(i)}, nullptr);
  }
}

const std::string& GradientShards::no_address() noexcept { return kSharded; }

// Reading is over the network: without the mutex.
Block GradientShards::make(ChunkId chunk, Contents contents) {
  Block copy = blocks_.take(layout_.chunk(chunk).used_bytes);
  if (contents == Contents::kMean) {
    shards_.start_read(index(of(chunk)), {copy.data(), copy.bytes()}).wait();
  } else {
    std::memset(copy.data(), 0, copy.bytes());
  }
  return copy;
}

void GradientShards::bring(ChunkId chunk, Contents contents, Access access,
                           std::size_t num_visits) {
  MutexLock lock(mutex_);
  Chunk& own = chunks_[index(chunk)];
  changed_.wait(lock.native(), [&] { return !own.busy; });
  if (!own.copy) {
    drop_read();
    own.busy = true;
    const Contents brought = own.reduced ? contents : Contents::kZeros;
    lock.unlock();
    Block copy;
    std::exception_ptr failure;
    try {
      copy = make(chunk, brought);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    own.busy = false;
    changed_.notify_all();
    if (failure) {
      std::rethrow_exception(failure);
    }
    own.copy = std::move(copy);
    copy_bytes_ += own.copy.bytes();
    peak_copy_bytes_ = std::max(peak_copy_bytes_, copy_bytes_);
  }
  own.written = own.written || access == Access::kWrite;
  own.num_visits += num_visits;
  if (own.num_visits > 0) {
    follower_.point_at(chunk, own.copy.data());
  }
}

void GradientShards::drop(ChunkId chunk) {
  Chunk& own = chunks_[index(chunk)];
  copy_bytes_ -= own.copy.bytes();
  blocks_.give_back(std::move(own.copy));
  own.written = false;
}

// The copy that was left for the next reader.
void GradientShards::drop_read() {
  if (read_) {
    const ChunkId chunk = *std::exchange(read_, std::nullopt);
    const Chunk& left = chunks_[index(chunk)];
    if (left.copy && !left.written && !left.busy && left.num_visits == 0) {
      drop(chunk);
    }
  }
}

void GradientShards::take_copy(ChunkId chunk, Contents contents) {
  bring(chunk, contents, Access::kWrite, /*num_visits=*/0);
}

void GradientShards::drop_copy(ChunkId chunk) {
  MutexLock lock(mutex_);
  const Chunk& own = chunks_[index(chunk)];
  changed_.wait(lock.native(), [&] { return !own.busy && own.num_visits == 0; });
  if (own.copy) {
    drop(chunk);
  }
}

bool GradientShards::has_copy(ChunkId chunk) const {
  const MutexLock lock(mutex_);
  return chunks_[index(chunk)].written;
}

std::byte* GradientShards::copy(ChunkId chunk) const {
  const MutexLock lock(mutex_);
  return chunks_[index(chunk)].copy.data();
}

std::byte* GradientShards::shard(ChunkId chunk) const {
  const std::span<std::byte> mean = shards_.shard(of(chunk));
  const MutexLock lock(mutex_);
  const Chunk& own = chunks_[index(chunk)];
  return own.written ? own.copy.data() + shards_.rank() * mean.size() : mean.data();
}

std::shared_ptr<void> GradientShards::visit(ChunkId chunk, Access access) {
  bring(chunk, Contents::kMean, access, /*num_visits=*/1);
  return std::make_shared<Visit>(*this, chunk);
}

void GradientShards::end_visit(ChunkId chunk) noexcept {
  {
    const MutexLock lock(mutex_);
    Chunk& own = chunks_[index(chunk)];
    if (--own.num_visits == 0) {
      follower_.point_at(chunk, nullptr);
      if (!own.written && read_ != chunk) {
        drop_read();
        read_ = chunk;
      }
    }
  }
  changed_.notify_all();
}

void GradientShards::reduce(ChunkId chunk, const Reduce& work) {
  MutexLock lock(mutex_);
  Chunk& own = chunks_[index(chunk)];
  changed_.wait(lock.native(), [&] { return !own.busy && own.num_visits == 0; });
  own.busy = true;
  const std::span<const std::byte> copy(own.copy.data(), own.copy.bytes());
  lock.unlock();
  std::exception_ptr failure;
  try {
    shards_.begin_update(of(chunk));
    work(copy, shards_.shard(of(chunk)));
    shards_.end_update(of(chunk));
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  own.busy = false;
  if (!failure) {
    own.reduced = true;
    if (own.copy) {
      drop(chunk);
    }
  }
  changed_.notify_all();
  if (failure) {
    std::rethrow_exception(failure);
  }
}

std::size_t GradientShards::copy_bytes() const {
  const MutexLock lock(mutex_);
  return copy_bytes_;
}

std::size_t GradientShards::peak_copy_bytes() const {
  const MutexLock lock(mutex_);
  return peak_copy_bytes_;
}

}  // namespace castor
