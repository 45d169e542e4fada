#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "io/direct_file.h"
#include "io/io_engines.h"

namespace castor {

enum class IoMix { kRead, kWrite, kMixed };

/// Returns the mix that is called "read", "write" or "mixed". Throws InvalidArgument for anything
/// else.
[[nodiscard]] IoMix parse_io_mix(std::string_view name);

/// Sequential transfers of one size, a fixed number of them in flight, for a given time. They pass
/// over a range of a file, and begin again at its start. kMixed reads and writes in turn, each in a
/// sequence of its own, and makes at least one transfer of each.
struct IoWorkload {
  IoMix mix = IoMix::kRead;
  std::size_t block_bytes = std::size_t{1} << 20;
  std::size_t depth = 32;
  std::uint64_t begin = 0;  ///< byte of the file where the range begins
  std::uint64_t bytes = 0;  ///< bytes of the range; at least one block
  double seconds = 1.0;
};

struct IoMeasurement {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  double seconds = 0.0;
  std::string engine;
};

/// Runs the workload on an engine of its own. Overwrites the range unless the workload only reads.
/// Throws IoError for a failed or short transfer, InvalidArgument for a workload that makes no
/// sense.
[[nodiscard]] IoMeasurement measure_io(IoEngineKind kind, const DirectFile& file,
                                       const IoWorkload& workload);

/// Writes the full range once, so that every later read finds written data. The file system answers
/// reads of space that is only reserved without asking the device.
void fill_range(IoEngineKind kind, const DirectFile& file, std::uint64_t begin,
                std::uint64_t bytes);

}  // namespace castor
