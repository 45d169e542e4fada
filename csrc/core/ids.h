#pragma once

#include <cstddef>
#include <cstdint>

namespace castor {

/// Positions in the tables that boost builds; dense from 0, never reused.
enum class ParamId : std::uint32_t {};
enum class ChunkId : std::uint32_t {};
enum class ModuleId : std::uint32_t {};

template <typename Id>
[[nodiscard]] constexpr std::size_t index(Id id) noexcept {
  return static_cast<std::size_t>(id);
}

}  // namespace castor
