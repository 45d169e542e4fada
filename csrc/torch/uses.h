#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <type_traits>

namespace castor {

/// Returns the number of references to a tensor or a storage. A Python object that nothing but the
/// tensor itself keeps alive does not count. Torch counts such an object as a reference from 2.10
/// on, and not before.
template <typename Target>
requires std::is_base_of_v<c10::intrusive_ptr_target, Target>
[[nodiscard]] std::size_t uses_of(Target& target) noexcept {
  const std::size_t uses = c10::raw::intrusive_ptr::use_count(&target);
  const auto& slot = *target.pyobj_slot();
  if constexpr (requires { slot.has_unique_reference(); }) {
    return uses - (slot.has_unique_reference() ? 1 : 0);
  }
  return uses;
}

[[nodiscard]] inline std::size_t uses_of(const c10::Storage& storage) noexcept {
  return uses_of(*storage.unsafeGetStorageImpl());
}

}  // namespace castor
