#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace castor {

inline constexpr std::size_t kKiB = std::size_t{1} << 10;
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kGiB = std::size_t{1} << 30;

/// Alignment of every parameter inside its chunk, in bytes: torch's own CPU alignment, so that
/// kernels take the same path, and give the same bits, as on a plain tensor.
inline constexpr std::size_t kParamAlignment = 64;

/// Rounds `value` up to a multiple of `alignment` (> 0).
[[nodiscard]] constexpr std::size_t align_up(std::size_t value, std::size_t alignment) noexcept {
  return (value + alignment - 1) / alignment * alignment;
}

/// Returns the bytes in the unit a person would choose, and the exact count: "512 bytes", "300.00
/// MiB (314572800 bytes)".
[[nodiscard]] std::string format_bytes(std::size_t bytes);

/// Returns `value` as 16 hexadecimal digits.
[[nodiscard]] std::string hexadecimal(std::uint64_t value);

}  // namespace castor
