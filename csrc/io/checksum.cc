#include "io/checksum.h"

// Inlined: no library to carry. SSE2 is part of x86-64, NEON of aarch64: as fast as memory.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

std::size_t num_blocks(std::size_t bytes) {
  return (bytes + kChecksumBlockBytes - 1) / kChecksumBlockBytes;
}

std::span<const std::byte> block(std::span<const std::byte> data, std::size_t i) {
  const std::size_t begin = i * kChecksumBlockBytes;
  return data.subspan(begin, std::min(kChecksumBlockBytes, data.size() - begin));
}

}  // namespace

std::uint64_t checksum(std::span<const std::byte> data) noexcept {
  return XXH3_64bits(data.data(), data.size());
}

struct alignas(64) StreamChecksum::State {
  XXH3_state_t xxh3;
};

StreamChecksum::StreamChecksum() : state_(std::make_unique<State>()) {
  static_cast<void>(XXH3_128bits_reset(&state_->xxh3));
}

StreamChecksum::~StreamChecksum() = default;

void StreamChecksum::update(std::span<const std::byte> data) noexcept {
  static_cast<void>(XXH3_128bits_update(&state_->xxh3, data.data(), data.size()));
}

std::string StreamChecksum::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh3);
  return hexadecimal(hash.high64) + hexadecimal(hash.low64);
}

std::vector<std::uint64_t> block_checksums(Executor& executor, std::span<const std::byte> data) {
  std::vector<std::uint64_t> sums(num_blocks(data.size()));
  executor.parallel_for(sums.size(), [&](std::size_t i) { sums[i] = checksum(block(data, i)); });
  return sums;
}

std::optional<ChecksumMismatch> find_mismatch(Executor& executor, std::span<const std::byte> data,
                                              std::span<const std::uint64_t> expected) {
  if (expected.size() != num_blocks(data.size())) {
    throw InvalidArgument("data of " + std::to_string(data.size()) + " bytes has " +
                          std::to_string(num_blocks(data.size())) + " checksums, and " +
                          std::to_string(expected.size()) + " were given");
  }
  const std::vector<std::uint64_t> found = block_checksums(executor, data);
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] != expected[i]) {
      return ChecksumMismatch{.offset = i * kChecksumBlockBytes,
                              .bytes = block(data, i).size(),
                              .expected = expected[i],
                              .found = found[i]};
    }
  }
  return std::nullopt;
}

}  // namespace castor
