#pragma once

#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

namespace castor::testing {

[[nodiscard]] inline std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  std::generate(bytes.begin(), bytes.end(), [&] { return std::byte(random()); });
  return bytes;
}

}  // namespace castor::testing
