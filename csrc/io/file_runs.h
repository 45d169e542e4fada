#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/io_file.h"

namespace castor {

/// Location in a file of bytes that belong together: runs of one length, evenly apart.
struct FileRuns {
  std::uint64_t first = 0;   ///< byte of the file where the first run begins
  std::uint64_t length = 0;  ///< bytes of each run; 1 or more
  /// Bytes from the beginning of one run to that of the next; `length` or more.
  std::uint64_t stride = 0;
};

/// Writes a part of the bytes of `runs`, each run by a call of its own, for runs so short that
/// there are millions of them.
///
/// `bytes` are in the order of the runs, and begin with the byte number `begin` of all their bytes.
/// Any thread may call it; others may write other bytes of the file meanwhile. Throws IoError where
/// the disk refuses, InvalidArgument of runs that are empty or overlap.
void write_runs(const IoFile& file, std::span<const std::byte> bytes, std::uint64_t begin,
                const FileRuns& runs);

}  // namespace castor
