#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/io_file.h"

namespace castor {

/// Where bytes that belong together lie in a file: in runs of one length, evenly apart.
struct FileRuns {
  std::uint64_t first = 0;   ///< byte of the file where the first one begins
  std::uint64_t length = 0;  ///< of each; 1 or more
  std::uint64_t stride = 0;  ///< from the beginning of one to that of the next; `length` or more
};

/// Writes a part of what `runs` hold, each run by a call of its own: for runs so short that there
/// are millions of them.
///
/// `bytes` are in the order of the runs, from the begin-th of all their bytes on. Any thread may
/// call it; others may write other bytes of the file meanwhile. Throws IoError where the disk
/// refuses, InvalidArgument of runs that are empty or overlap.
void write_runs(const IoFile& file, std::span<const std::byte> bytes, std::uint64_t begin,
                const FileRuns& runs);

}  // namespace castor
