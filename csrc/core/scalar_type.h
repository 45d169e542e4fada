#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace castor {

/// Element type of a chunk. kUInt8: bytes that a layer packs numbers into by itself. Such
/// parameters are frozen, and nothing here computes with them.
enum class ScalarType : std::uint8_t { kFloat32, kBFloat16, kFloat16, kUInt8 };

[[nodiscard]] constexpr std::size_t size_of(ScalarType type) noexcept {
  return type == ScalarType::kFloat32 ? 4 : type == ScalarType::kUInt8 ? 1 : 2;
}

[[nodiscard]] constexpr std::string_view to_string(ScalarType type) noexcept {
  switch (type) {
    case ScalarType::kFloat32: return "float32";
    case ScalarType::kBFloat16: return "bfloat16";
    case ScalarType::kFloat16: return "float16";
    case ScalarType::kUInt8: return "uint8";
  }
  return "unknown";
}

/// Throws InvalidArgument: there are no numbers of this type to compute with.
[[noreturn]] void throw_no_arithmetic(ScalarType type);

}  // namespace castor
