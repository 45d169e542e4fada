#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/io_engine.h"
#include "io/fault_injection.h"
#include "io/io_file.h"

namespace castor {

enum class IoEngineKind {
  kAuto,     ///< io_uring where it works, else threads
  kIoUring,  ///< io_uring or an error
  kThreads,
};

/// "auto", "io_uring" or "threads". Throws InvalidArgument for anything else.
[[nodiscard]] IoEngineKind parse_io_engine_kind(std::string_view name);

/// Why io_uring cannot be used here ("" when it can): castor was built without liburing, or the
/// kernel or the container forbids it.
[[nodiscard]] std::string why_no_io_uring();

/// Makes an engine over `files`, which stay open as long as it lives. `buffers` are registered with
/// the kernel where the engine can, and outlive it too. With kAuto the engine's description() says
/// why it is not io_uring, if it is not. Throws InvalidArgument for a depth of 0, IoError when
/// kIoUring is asked for and cannot be.
///
/// Where the environment sets CASTOR_IO_FAULTS, the engine is a FaultyIoEngine that does what
/// parse_io_faults() makes of it (and throws what that throws), and its description() says so.
[[nodiscard]] std::unique_ptr<IoEngine> make_io_engine(
    IoEngineKind kind, std::vector<IoFile> files, std::size_t queue_depth,
    std::span<const std::span<std::byte>> buffers = {});

/// Of all engines so far that CASTOR_IO_FAULTS has wrapped, in this process. Thread-safe.
[[nodiscard]] IoFaultCounts io_fault_counts() noexcept;

}  // namespace castor
