#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "io/chunk_stream.h"

namespace castor {

/// On NVMe, and in a slot.
[[nodiscard]] inline std::size_t padded_bytes_of(const StoredChunk& chunk) noexcept {
  std::size_t bytes = 0;
  for (const StoredPayload& payload : chunk) {
    bytes += payload.padded_bytes();
  }
  return bytes;
}

/// Memory for one chunk, and what is known of the chunk in it. Guarded by the stream's mutex; while
/// it is busy, its transfers and its chunk's payloads belong to the thread that works on them.
struct ChunkStream::Slot {
  std::span<std::byte> memory;
  /// Whose payloads are here, or on their way.
  std::optional<std::size_t> chunk;
  /// Whose will be, once those have left: nobody else may take the slot.
  std::optional<std::size_t> coming;
  std::vector<std::thread::id> holders;
  bool busy = false;     // somebody works on its transfers without the mutex
  bool wanted = false;   // announced, not used yet
  bool changed = false;  // differs from NVMe, and no write of it is under way
  bool due = false;      // and to be written as soon as nobody holds it
  std::uint64_t last_use = 0;
  std::exception_ptr failure;                  // of the read, for everybody who holds it
  std::vector<std::span<std::byte>> padded;    // as transferred
  std::vector<std::span<std::byte>> payloads;  // as worked on
  std::vector<IoTransfer> reading;             // empty: nothing to wait for
  std::vector<IoTransfer> writing;

  [[nodiscard]] bool free() const noexcept { return !busy && holders.empty(); }
};

}  // namespace castor
