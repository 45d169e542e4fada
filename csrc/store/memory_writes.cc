#include "store/memory_writes.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core/mutex.h"

namespace castor {

struct MemoryWrites::Register {
  static Register& instance() {
    static Register& all = *new Register;  // tensors may outlive static objects
    return all;
  }
  [[nodiscard]] MemoryWrites* find(const void* memory) noexcept CASTOR_REQUIRES(mutex) {
    const auto found = records.find(memory);
    return found == records.end() ? nullptr : found->second;
  }

  Mutex mutex;
  std::unordered_map<const void*, MemoryWrites*> records CASTOR_GUARDED_BY(mutex);
};

MemoryWrites::MemoryWrites(std::span<const void* const> memory)
    : memory_(memory.begin(), memory.end()) {
  Register& all = Register::instance();
  const MutexLock lock(all.mutex);
  for (const void* const own : memory_) {
    all.records[own] = this;
  }
}

MemoryWrites::~MemoryWrites() {
  Register& all = Register::instance();
  const MutexLock lock(all.mutex);
  for (const void* const own : memory_) {
    all.records.erase(own);
  }
}

void MemoryWrites::follow(std::unique_ptr<WriteSign> sign, const void* of) {
  const MutexLock lock(Register::instance().mutex);
  follow_locked({.sign = std::move(sign), .of = of});
}

void MemoryWrites::follow_locked(Followed followed) {
  if (signs_.size() >= prune_at_) {
    prune_locked();
    prune_at_ = 2 * signs_.size() + 16;
  }
  signs_.push_back(std::move(followed));
}

template <typename Ended>
void MemoryWrites::forget_locked(const Ended& ended) noexcept {
  std::erase_if(signs_, [&](const Followed& followed) {
    const bool forgotten = ended(followed);
    written_ = written_ || (forgotten && followed.sign->changed());
    return forgotten;
  });
}

void MemoryWrites::replace(const void* memory, const void* other) {
  Register& all = Register::instance();
  const MutexLock lock(all.mutex);
  all.records.erase(memory);
  all.records[other] = this;
  std::replace(memory_.begin(), memory_.end(), memory, other);
  forget_locked([memory](const Followed& followed) { return followed.of == memory; });
}

void MemoryWrites::note() noexcept {
  const MutexLock lock(Register::instance().mutex);
  written_ = true;
}

bool MemoryWrites::written_locked() const noexcept {
  return written_ || std::any_of(signs_.begin(), signs_.end(),
                                 [](const Followed& followed) { return followed.sign->changed(); });
}

void MemoryWrites::prune_locked() noexcept {
  forget_locked([](const Followed& followed) { return followed.sign->gone(); });
}

// Who is gone by now can write no more; until now they may have written.
void MemoryWrites::snapshot_locked() noexcept {
  written_before_ = written_before_ || written_locked();
  prune_locked();
  for (const Followed& followed : signs_) {
    followed.sign->mark();
  }
  written_ = false;
}

void MemoryWrites::snapshot() noexcept {
  const MutexLock lock(Register::instance().mutex);
  snapshot_locked();
}

bool MemoryWrites::since_snapshot() const noexcept {
  const MutexLock lock(Register::instance().mutex);
  return written_locked();
}

bool MemoryWrites::take_written() noexcept {
  const MutexLock lock(Register::instance().mutex);
  snapshot_locked();
  return std::exchange(written_before_, false);
}

bool MemoryWrites::watched(const void* memory) noexcept {
  Register& all = Register::instance();
  const MutexLock lock(all.mutex);
  return all.find(memory) != nullptr;
}

void MemoryWrites::follow_at(const void* memory, const MakeSign& make) {
  Register& all = Register::instance();
  const MutexLock lock(all.mutex);
  if (MemoryWrites* const writes = all.find(memory)) {
    writes->follow_locked({.sign = make()});
  }
}

void MemoryWrites::note_at(const void* memory) noexcept {
  Register& all = Register::instance();
  const MutexLock lock(all.mutex);
  if (MemoryWrites* const writes = all.find(memory)) {
    writes->written_ = true;
  }
}

}  // namespace castor
