#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace castor {

/// Sign of writes to memory, by whoever has a share in it: a counter that tensors over the memory
/// share, or tensors whose writes nothing counts. Called by one thread at a time.
class WriteSign {
 public:
  virtual ~WriteSign() = default;
  /// Returns whether there may have been a write since this was made, or since the last mark().
  [[nodiscard]] virtual bool changed() const noexcept = 0;
  /// Returns whether nobody is left who could write.
  [[nodiscard]] virtual bool gone() const noexcept = 0;
  virtual void mark() noexcept = 0;
};

/// Record of whether somebody has written to one of some pieces of memory, each told by an address
/// that no other has. The record follows signs of writes, and is told of writes that leave none.
///
/// The process has a register of all records, by the address of their memory. Thread-safe.
class MemoryWrites {
 public:
  using MakeSign = std::function<std::unique_ptr<WriteSign>()>;

  /// Watches `memory`, which no other record watches, while this lives.
  explicit MemoryWrites(std::span<const void* const> memory);
  ~MemoryWrites();
  MemoryWrites(const MemoryWrites&) = delete;
  MemoryWrites& operator=(const MemoryWrites&) = delete;

  /// Follows the sign until it is gone. `of`: the one piece of memory that it is about, until that
  /// is replaced; nullptr where it may be about any.
  void follow(std::unique_ptr<WriteSign> sign, const void* of = nullptr);
  /// Watches `other` in place of `memory`, whose writes so far count.
  void replace(const void* memory, const void* other);
  /// Records a write that leaves no sign.
  void note() noexcept;
  void snapshot() noexcept;
  [[nodiscard]] bool since_snapshot() const noexcept;
  /// Takes a snapshot. Returns whether there was a write since the previous call.
  [[nodiscard]] bool take_written() noexcept;

  /// Returns whether a record watches the memory.
  [[nodiscard]] static bool watched(const void* memory) noexcept;
  /// Makes the record that watches the memory follow a sign; no effect where there is none.
  static void follow_at(const void* memory, const MakeSign& make);
  /// Records a write in the record that watches the memory, if there is one.
  static void note_at(const void* memory) noexcept;

 private:
  struct Register;
  struct Followed {
    std::unique_ptr<WriteSign> sign;
    const void* of = nullptr;
  };
  void follow_locked(Followed followed);
  [[nodiscard]] bool written_locked() const noexcept;
  /// Forgets signs, and remembers whether they changed: those that have `ended`, or are gone.
  template <typename Ended>
  void forget_locked(const Ended& ended) noexcept;
  void prune_locked() noexcept;
  void snapshot_locked() noexcept;

  // All guarded by the register's mutex.
  std::vector<const void*> memory_;
  std::vector<Followed> signs_;
  std::size_t prune_at_ = 0;     // signs
  bool written_ = false;         // since the snapshot, by other signs than signs_
  bool written_before_ = false;  // before the snapshot, after take_written()
};

}  // namespace castor
