#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "io/unique_fd.h"

namespace castor {

/// Smallest boundary, in bytes, on which transfers are laid out: the block size of ext4 and xfs,
/// and the sector of every NVMe device that is in use.
inline constexpr std::size_t kIoAlignment = 4096;

enum class FileAccess { kRead, kReadWrite };

/// An open file whose transfers go past the page cache (O_DIRECT) where the file system allows it,
/// and through it elsewhere. description() says which, and why.
///
/// The page cache would keep a second copy of data that was moved to NVMe because host memory is
/// short. Owned by whoever opened it; engines borrow the descriptor. Const members are thread-safe.
class DirectFile {
 public:
  /// Opens an existing regular file. Throws IoError.
  DirectFile(const std::string& path, FileAccess access);
  /// Takes over a descriptor. Throws IoError when the file system cannot be asked about it.
  DirectFile(UniqueFd descriptor, std::string path);

  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] bool direct() const noexcept { return buffered_because_.empty(); }
  /// Returns the alignment, in bytes, of offsets, sizes and buffers of direct transfers; at least
  /// kIoAlignment.
  [[nodiscard]] std::size_t alignment() const noexcept { return alignment_; }
  /// Returns text like "/data/castor.scratch (O_DIRECT)" or "/tmp/x (buffered: tmpfs is memory)".
  [[nodiscard]] std::string description() const;
  /// Returns the size of the file. Throws IoError.
  [[nodiscard]] std::uint64_t bytes() const;

 private:
  void go_direct();

  UniqueFd descriptor_;
  std::string path_;
  std::string buffered_because_;
  std::size_t alignment_ = kIoAlignment;
};

}  // namespace castor
