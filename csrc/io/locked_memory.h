#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace castor {

/// Returns the bytes that this process may lock (RLIMIT_MEMLOCK); nullopt where there is no limit.
[[nodiscard]] std::optional<std::uint64_t> locked_memory_limit();

/// Says what to change where the kernel has no memory (ENOMEM) for io_uring's rings and buffers,
/// which count as locked memory.
///
/// `limit` is locked_memory_limit().
[[nodiscard]] std::string locked_memory_remedy(std::optional<std::uint64_t> limit);

}  // namespace castor
