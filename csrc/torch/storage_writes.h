#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <span>
#include <vector>

namespace castor {

/// Tells whether torch's operators have written to one of some storages: those of a chunk.
///
/// An operator counts its write in the version counter of the tensor that it is given, which views
/// and detach() share. The counters of all tensors over the storages are followed: of those that
/// are given to follow(), and of those that are made later with a counter of their own (`.data`,
/// `tensor.data = parameter`, `set_`). Operators that count nothing (the fused optimizers of torch,
/// most operators of C++ extensions) are known by what their schemas say they write.
///
/// Not seen is what writes without an operator: to an address, through numpy or DLPack.
///
/// Owned by ChunkStorages. Thread-safe.
class StorageWrites {
 public:
  /// Watches the storages, none of which may be resizable, while this lives; they have to outlive
  /// it.
  explicit StorageWrites(std::span<const c10::Storage> storages);
  ~StorageWrites();
  StorageWrites(const StorageWrites&) = delete;
  StorageWrites& operator=(const StorageWrites&) = delete;

  /// Follows a tensor over one of the storages, and those that share its version counter.
  void follow(const at::TensorBase& tensor);
  /// `other`, which may not be resizable, takes the place of one of the storages.
  void replace(const c10::Storage& storage, const c10::Storage& other);
  /// While one of the storages has more than `uses` references, it counts as written: of the
  /// tensors over it some are not known.
  void distrust(const c10::Storage& storage, std::size_t uses);
  /// One of the storages is written, which nothing else tells.
  void note() noexcept;
  void snapshot() noexcept;
  [[nodiscard]] bool since_snapshot() const noexcept;

 private:
  friend class WatchedWrites;
  struct Counter {
    c10::VariableVersion version;
    std::uint32_t at_snapshot = 0;

    [[nodiscard]] bool changed() const noexcept { return version.current_version() != at_snapshot; }
  };
  void follow_locked(const at::TensorBase& tensor);
  /// Forgets tensors that are gone, and remembers whether they were written.
  void prune() noexcept;

  struct Distrusted {
    c10::StorageImpl* storage = nullptr;
    std::size_t uses = 0;
  };

  std::vector<const c10::StorageImpl*> storages_;
  std::vector<Distrusted> distrusted_;  // of storages_
  std::vector<Counter> counters_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> uncounted_;  // made in inference mode
  std::size_t prune_at_ = 0;                                         // counters
  bool written_ = false;  // since the snapshot, as others than counters_ tell
};

/// Operators that torch has got to know since the last call, and that count none of their writes,
/// are told of from now on. Costs next to nothing while there are none.
void notice_new_operators();

/// Whether somebody's writes to the storage are asked for.
[[nodiscard]] bool is_watched(const c10::Storage& storage);

/// How often a tensor over a storage that is watched, or as good as that, was given other memory
/// (`.data =`, `set_`), in the whole process.
[[nodiscard]] std::uint64_t num_given_memory() noexcept;

/// What runs before torch makes a tensor of its own over another's memory (`.data`): pickling a
/// parameter begins so, and reads its storage then. One for the process; from any thread.
using BeforeData = void (*)(const at::TensorBase& tensor);
void set_before_data(BeforeData call) noexcept;

}  // namespace castor
