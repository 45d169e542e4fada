#include "core/units.h"

#include <array>
#include <cstdio>

namespace castor {

std::string format_bytes(std::size_t bytes) {
  if (bytes < kKiB) {
    return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  }
  static constexpr std::array<const char*, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / static_cast<double>(kKiB);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.2f %s (%zu bytes)", value, kUnits[unit], bytes);
  return text.data();
}

std::string hexadecimal(std::uint64_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = text.size(); i-- > 0; value >>= 4) {
    text[i] = kDigits[value & 15];
  }
  return text;
}

}  // namespace castor
