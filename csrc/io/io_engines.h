#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/io_engine.h"
#include "io/io_file.h"

namespace castor {

enum class IoEngineKind {
  kAuto,     ///< io_uring where it works, else threads
  kIoUring,  ///< io_uring or an error
  kThreads,
};

/// Returns the kind that is called "auto", "io_uring" or "threads". Throws InvalidArgument for
/// anything else.
[[nodiscard]] IoEngineKind parse_io_engine_kind(std::string_view name);

/// Says why io_uring cannot be used here: castor was built without liburing, or the kernel or the
/// container forbids it. Returns "" when it can be used.
[[nodiscard]] std::string why_no_io_uring();

/// Makes an engine over `files`, which stay open as long as the engine lives. `buffers` are
/// registered with the kernel where the engine can, and also outlive the engine. With kAuto the
/// engine's description() says why it is not io_uring, if it is not. Throws InvalidArgument for a
/// depth of 0, IoError when kIoUring is asked for and cannot be used.
[[nodiscard]] std::unique_ptr<IoEngine> make_io_engine(
    IoEngineKind kind, std::vector<IoFile> files, std::size_t queue_depth,
    std::span<const std::span<std::byte>> buffers = {});

}  // namespace castor
