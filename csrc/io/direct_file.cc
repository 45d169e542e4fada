#include "io/direct_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/error.h"
#include "io/aligned_buffer.h"

namespace castor {
namespace {

UniqueFd open_existing(const std::string& path, FileAccess access) {
  const int mode = access == FileAccess::kRead ? O_RDONLY : O_RDWR;
  int descriptor = -1;
  do {
    descriptor = ::open(path.c_str(), mode | O_CLOEXEC);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) {
    throw IoError(errno, path, 0, "cannot open");
  }
  return UniqueFd(descriptor);
}

/// The alignment that the file system asks for, where the kernel tells (Linux 6.1), else 0.
std::size_t reported_alignment(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx status = {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    return std::max<std::size_t>(status.stx_dio_mem_align, status.stx_dio_offset_align);
  }
#else
  (void)descriptor;
#endif
  return 0;
}

}  // namespace

DirectFile::DirectFile(const std::string& path, FileAccess access)
    : DirectFile(open_existing(path, access), path) {}

DirectFile::DirectFile(UniqueFd descriptor, std::string path)
    : descriptor_(std::move(descriptor)), path_(std::move(path)) {
  struct stat status = {};
  if (::fstat(descriptor_.get(), &status) != 0) {
    throw IoError(errno, path_, 0, "cannot ask for the size of");
  }
  if (!S_ISREG(status.st_mode)) {
    throw IoError(EINVAL, path_, 0, "not a regular file:");
  }
  go_direct();
}

void DirectFile::go_direct() {
  struct statfs file_system = {};
  if (::fstatfs(descriptor_.get(), &file_system) != 0) {
    throw IoError(errno, path_, 0, "cannot ask for the file system of");
  }
  // Newer kernels accept O_DIRECT there and ignore it.
  if (file_system.f_type == TMPFS_MAGIC || file_system.f_type == RAMFS_MAGIC) {
    buffered_because_ = "tmpfs is host memory, not a device";
    return;
  }
  const int flags = ::fcntl(descriptor_.get(), F_GETFL);
  if (flags < 0) {
    throw IoError(errno, path_, 0, "cannot ask for the flags of");
  }
  if (::fcntl(descriptor_.get(), F_SETFL, flags | O_DIRECT) != 0) {
    buffered_because_ = "the file system refuses O_DIRECT";
    return;
  }
  alignment_ = std::max(kIoAlignment, reported_alignment(descriptor_.get()));
  // Some file systems accept the flag and refuse the transfers.
  const AlignedBuffer probe(alignment_, alignment_);
  ssize_t transferred = 0;
  do {
    transferred = ::pread(descriptor_.get(), probe.data(), alignment_, 0);
  } while (transferred < 0 && errno == EINTR);
  const int error_number = transferred < 0 ? errno : 0;
  if (error_number == EINVAL) {
    if (::fcntl(descriptor_.get(), F_SETFL, flags) != 0) {
      throw IoError(errno, path_, 0, "cannot clear O_DIRECT on");
    }
    buffered_because_ = "the file system refuses transfers with O_DIRECT";
    alignment_ = kIoAlignment;
  } else if (error_number != 0) {
    throw IoError(error_number, path_, 0, "cannot read");
  }
}

std::string DirectFile::description() const {
  return path_ + (direct() ? " (O_DIRECT)" : " (buffered: " + buffered_because_ + ")");
}

std::uint64_t DirectFile::bytes() const {
  struct stat status = {};
  if (::fstat(descriptor_.get(), &status) != 0) {
    throw IoError(errno, path_, 0, "cannot ask for the size of");
  }
  return static_cast<std::uint64_t>(status.st_size);
}

}  // namespace castor
