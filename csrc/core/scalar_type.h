#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace castor {

/// Element types a chunk can hold.
enum class ScalarType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

[[nodiscard]] constexpr std::size_t size_of(ScalarType type) noexcept {
  return type == ScalarType::kFloat32 ? 4 : 2;
}

[[nodiscard]] constexpr std::string_view to_string(ScalarType type) noexcept {
  switch (type) {
    case ScalarType::kFloat32: return "float32";
    case ScalarType::kBFloat16: return "bfloat16";
    case ScalarType::kFloat16: return "float16";
  }
  return "unknown";
}

}  // namespace castor
