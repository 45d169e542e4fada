#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "io/direct_file.h"
#include "io/io_engines.h"

namespace castor {

enum class IoMix { kRead, kWrite, kMixed };

/// "read", "write" or "mixed". Throws InvalidArgument for anything else.
[[nodiscard]] IoMix parse_io_mix(std::string_view name);

/// Sequential transfers of one size, a fixed number in flight, over a range of a file and again
/// from its start, for a time. kMixed reads and writes in turn, each in its own sequence; once
/// at least.
struct IoWorkload {
  IoMix mix = IoMix::kRead;
  std::size_t block_bytes = std::size_t{1} << 20;
  std::size_t depth = 32;
  std::uint64_t begin = 0;  ///< of the range, in the file
  std::uint64_t bytes = 0;  ///< of the range; at least one block
  double seconds = 1.0;
};

struct IoMeasurement {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  double seconds = 0.0;
  std::string engine;
};

/// Runs the workload on an engine of its own. Overwrites the range unless it only reads. Throws
/// IoError for a failed or short transfer, InvalidArgument for a workload that makes no sense.
[[nodiscard]] IoMeasurement measure_io(IoEngineKind kind, const DirectFile& file,
                                       const IoWorkload& workload);

/// Writes the whole range once, so that no later read finds space that was only reserved (which the
/// file system answers without asking the device).
void fill_range(IoEngineKind kind, const DirectFile& file, std::uint64_t begin,
                std::uint64_t bytes);

}  // namespace castor
