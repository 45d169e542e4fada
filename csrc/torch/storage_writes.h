#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "store/memory_writes.h"

namespace castor {

/// Record of whether torch's operators have written to one of some storages: those of a chunk.
///
/// An operator counts its write in the version counter of the tensor that it is given, which views
/// and detach() share. The record follows the counters of all tensors over the storages. Such
/// tensors are given to follow(), or made later with a counter of their own (`.data`,
/// `tensor.data = parameter`, `set_`). Some operators count nothing (the fused optimizers of torch,
/// most operators of C++ extensions): their schemas say what they write.
///
/// Writes without an operator are not seen: to an address, through numpy or DLPack.
///
/// Owned by ChunkStorages. Thread-safe.
class StorageWrites final : public MemoryWrites {
 public:
  /// Watches the storages while this lives; they have to outlive it. Throws InvalidArgument if one
  /// is resizable.
  explicit StorageWrites(std::span<const c10::Storage> storages);

  /// Follows a tensor over one of the storages, and those that share its version counter.
  void follow(const at::TensorBase& tensor);
  /// Watches `other`, which may not be resizable, in place of one of the storages.
  void replace(const c10::Storage& storage, const c10::Storage& other);
  /// Counts a storage as written while it has more than `uses` references: some of the tensors over
  /// it are not known.
  void distrust(const c10::Storage& storage, std::size_t uses);
};

/// Watches from now on the operators that torch has got to know since the last call and that count
/// none of their writes. Costs next to nothing while there are none.
void notice_new_operators();

/// Returns whether a StorageWrites watches the storage.
[[nodiscard]] bool is_watched(const c10::Storage& storage);

/// Returns how often a tensor over a storage that is watched, or may be, was given other memory
/// (`.data =`, `set_`), in the whole process.
[[nodiscard]] std::uint64_t num_given_memory() noexcept;

/// Function that runs before torch makes a tensor of its own over another's memory (`.data`):
/// pickling a parameter begins so, and then reads its storage. There is one for the process, called
/// from any thread.
using BeforeData = void (*)(const at::TensorBase& tensor);
void set_before_data(BeforeData call);

}  // namespace castor
