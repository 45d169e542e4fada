#include "io/file_runs.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"

namespace castor {
namespace {

void write_at(const IoFile& file, std::span<const std::byte> bytes, std::uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t written =
        ::pwrite(file.descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      throw IoError(written < 0 ? errno : EIO, file.path, offset, "cannot write");
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

}  // namespace

void write_runs(const IoFile& file, std::span<const std::byte> bytes, std::uint64_t begin,
                const FileRuns& runs) {
  if (runs.length == 0 || runs.stride < runs.length) {
    throw InvalidArgument("runs of a file are empty or overlap");
  }
  std::uint64_t run = begin / runs.length;
  std::uint64_t within = begin % runs.length;
  while (!bytes.empty()) {
    const std::size_t count = std::min<std::uint64_t>(runs.length - within, bytes.size());
    write_at(file, bytes.first(count), runs.first + run * runs.stride + within);
    bytes = bytes.subspan(count);
    ++run;
    within = 0;
  }
}

}  // namespace castor
