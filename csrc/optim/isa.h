#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace castor {

/// Instruction sets that the optimizer loops are compiled for. All give the same bits; they differ
/// in speed only. kBaseline is the compiler's default target (SSE2 on x86-64) and the only one on
/// other architectures.
enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

[[nodiscard]] constexpr std::string_view to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::kBaseline: return "baseline";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "unknown";
}

/// Returns the instruction sets that this processor and operating system can run, slowest first;
/// never empty.
[[nodiscard]] std::span<const Isa> supported_isas() noexcept;

/// Returns the instruction set that is used when none is asked for: the last of supported_isas().
[[nodiscard]] Isa best_isa() noexcept;

}  // namespace castor
