#include "io/scratch_file.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/units.h"
#include "io/checksum.h"

namespace castor {
namespace {

constexpr std::array<char, 8> kMagic = {'C', 'A', 'S', 'T', 'O', 'R', 'S', 'C'};
constexpr std::uint32_t kVersion = 1;
// Between open and lock another job may remove the file; who loses that race tries again.
constexpr int kMaxRaces = 100;
// A job that was killed keeps its lock until the kernel has closed its io_uring and its forked
// children (data loader workers) have noticed, after up to 5 s.
constexpr auto kDeadOwnerPatience = std::chrono::seconds(10);
constexpr auto kDeadOwnerPoll = std::chrono::milliseconds(10);

/// The first bytes of a scratch file. All versions begin with magic and version.
struct Header {
  std::array<char, 8> magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t reserved = 0;
  std::uint64_t owner_pid = 0;
  std::uint64_t checksum = 0;  // of all before it

  [[nodiscard]] std::uint64_t compute_checksum() const noexcept {
    return castor::checksum(std::as_bytes(std::span(this, 1)).first(offsetof(Header, checksum)));
  }
};
static_assert(sizeof(Header) == 32);

template <typename Call>
auto without_interruption(Call&& call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

[[noreturn]] void fail_to_open(const std::string& path, int error_number) {
  const std::string directory = std::filesystem::path(path).parent_path().string();
  std::string remedy;
  switch (error_number) {
    case ENOENT:
    case ENOTDIR: remedy = "Create the directory " + directory + ", or give another path"; break;
    case EACCES:
    case EPERM:
    case EROFS: remedy = "Give a directory that this user may write to"; break;
    case ELOOP: remedy = "A symbolic link stands there: remove it, or give another path"; break;
    case EISDIR: remedy = "A directory stands there: give another path"; break;
    default: break;
  }
  throw IoError(error_number, path, 0, "cannot create the scratch file", remedy);
}

/// nullopt when fewer bytes than a header are there.
std::optional<Header> read_header(int descriptor, const std::string& path) {
  Header header;
  const ssize_t bytes =
      without_interruption([&] { return ::pread(descriptor, &header, sizeof(header), 0); });
  if (bytes < 0) {
    throw IoError(errno, path, 0, "cannot read the header of");
  }
  return bytes == sizeof(header) ? std::optional(header) : std::nullopt;
}

void write_header(int descriptor, const std::string& path) {
  Header header;
  header.owner_pid = static_cast<std::uint64_t>(::getpid());
  header.checksum = header.compute_checksum();
  const ssize_t bytes =
      without_interruption([&] { return ::pwrite(descriptor, &header, sizeof(header), 0); });
  if (bytes != sizeof(header)) {
    throw IoError(bytes < 0 ? errno : ENOSPC, path, 0, "cannot write the header of",
                  "Free space there, or give another path");
  }
  // So that after a power cut too a file with data has a header, and can be told from foreign ones.
  if (without_interruption([&] { return ::fdatasync(descriptor); }) != 0) {
    throw IoError(errno, path, 0, "cannot flush the header of");
  }
}

void check_ours(const std::optional<Header>& header, const std::string& path) {
  if (!header || header->magic != kMagic) {
    throw IoError(EEXIST, path, 0, "not a scratch file of castor's, and left alone:",
                  "Remove it, or give another path");
  }
  if (header->version != kVersion || header->checksum != header->compute_checksum()) {
    throw IoError(EEXIST, path, 0,
                  "a scratch file of another castor (version " + std::to_string(header->version) +
                      ", this one writes " + std::to_string(kVersion) +
                      ") or with a damaged header, and left alone:",
                  "Remove it if no job uses it, or give another path");
  }
}

/// Whether no such process is here any more. One of another machine or container may seem dead.
bool is_dead(std::uint64_t pid) {
  return pid != 0 && ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
}

bool is_still_at(const struct stat& status, const std::string& path) {
  struct stat there = {};
  return ::lstat(path.c_str(), &there) == 0 && there.st_ino == status.st_ino &&
         there.st_dev == status.st_dev;
}

void remove_if_same(int descriptor, const std::string& path) {
  struct stat status = {};
  if (::fstat(descriptor, &status) == 0 && is_still_at(status, path)) {
    if (::unlink(path.c_str()) != 0) {
      throw IoError(errno, path, 0, "cannot remove the scratch file", "Remove it by hand");
    }
  }
}

std::string needed_and_free(std::uint64_t needed, std::uint64_t free) {
  return "needs " + format_bytes(needed) + ", and the file system has " + format_bytes(free) +
         " free: free space there, give another path, or move less to NVMe";
}

/// Finds what would fail before anything is written; gives the free bytes.
std::uint64_t check_space(int descriptor, const std::string& path, std::uint64_t bytes) {
  struct rlimit limit = {};
  // Beyond that limit the kernel would send SIGXFSZ, which ends the process.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < bytes) {
    throw IoError(EFBIG, path, 0, "cannot preallocate the scratch file",
                  "It needs " + format_bytes(bytes) + ", and this process may write files of " +
                      format_bytes(limit.rlim_cur) + ": raise `ulimit -f`");
  }
  struct statvfs status = {};
  if (::fstatvfs(descriptor, &status) != 0) {
    throw IoError(errno, path, 0, "cannot ask for the free space of");
  }
  const std::uint64_t free = std::uint64_t{status.f_bavail} * status.f_frsize;
  // A tmpfs without a limit reports no blocks at all.
  if (status.f_blocks > 0 && free < bytes) {
    throw IoError(ENOSPC, path, 0, "cannot preallocate the scratch file",
                  "It " + needed_and_free(bytes, free));
  }
  return free;
}

void preallocate(int descriptor, const std::string& path, std::uint64_t bytes, std::uint64_t free) {
  const auto length = static_cast<off_t>(bytes);
  int error_number = 0;
  if (without_interruption([&] { return ::fallocate(descriptor, 0, 0, length); }) != 0) {
    error_number = errno;
  }
  if (error_number == EOPNOTSUPP) {  // glibc then writes into every block, which is slow but holds
    do {
      error_number = ::posix_fallocate(descriptor, 0, length);
    } while (error_number == EINTR);
  }
  if (error_number == EDQUOT) {
    throw IoError(EDQUOT, path, 0, "cannot preallocate the scratch file",
                  "It needs " + format_bytes(bytes) +
                      ", more than the quota leaves: raise it, give another path, or move less to "
                      "NVMe");
  }
  if (error_number != 0) {
    throw IoError(error_number, path, 0, "cannot preallocate the scratch file",
                  "It " + needed_and_free(bytes, free));
  }
}

}  // namespace

struct ScratchFile::Opened {
  UniqueFd descriptor;
  ScratchOrigin origin = ScratchOrigin::kNew;
};

ScratchFile::Opened ScratchFile::open_locked(const std::string& path) {
  const auto deadline = std::chrono::steady_clock::now() + kDeadOwnerPatience;
  for (int num_races = 0; num_races < kMaxRaces;) {
    UniqueFd descriptor(without_interruption([&] {
      return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR);
    }));
    if (!descriptor) {
      fail_to_open(path, errno);
    }
    struct stat status = {};
    if (::fstat(descriptor.get(), &status) != 0) {
      throw IoError(errno, path, 0, "cannot ask for the size of");
    }
    if (!S_ISREG(status.st_mode)) {
      throw IoError(EEXIST, path, 0, "not a regular file, and left alone:", "Give another path");
    }
    if (without_interruption([&] { return ::flock(descriptor.get(), LOCK_EX | LOCK_NB); }) != 0) {
      const int error_number = errno;
      if (error_number != EWOULDBLOCK) {
        throw IoError(error_number, path, 0, "cannot lock the scratch file",
                      "The file system may have no locks (NFS): give a local path");
      }
      const auto header = read_header(descriptor.get(), path);
      const bool known = header && header->magic == kMagic;
      const bool dead = known && is_dead(header->owner_pid);
      if (dead && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(kDeadOwnerPoll);
        continue;
      }
      throw IoError(
          EBUSY, path, 0,
          "in use by another castor job" +
              (known ? " (process " + std::to_string(header->owner_pid) +
                           (dead ? ", which is gone, but a child of it may still run" : "") + ")"
                     : std::string()) +
              ":",
          "Give each job, and each rank, a path of its own, or end that job");
    }
    if (::fstat(descriptor.get(), &status) != 0) {
      throw IoError(errno, path, 0, "cannot ask for the size of");
    }
    if (!is_still_at(status, path)) {
      ++num_races;  // whoever held the lock has removed the file
      continue;
    }
    if (status.st_size == 0) {
      return {std::move(descriptor), ScratchOrigin::kNew};
    }
    check_ours(read_header(descriptor.get(), path), path);
    return {std::move(descriptor), ScratchOrigin::kReclaimed};
  }
  throw IoError(EBUSY, path, 0, "cannot lock the scratch file",
                "Other jobs keep making and removing it: give each a path of its own");
}

ScratchFile::Opened ScratchFile::make(const std::string& path, std::uint64_t file_bytes) {
  Opened opened = open_locked(path);
  const int descriptor = opened.descriptor.get();
  try {
    if (without_interruption([&] { return ::ftruncate(descriptor, 0); }) != 0) {
      throw IoError(errno, path, 0, "cannot empty the scratch file");
    }
    const std::uint64_t free = check_space(descriptor, path, file_bytes);
    write_header(descriptor, path);
    preallocate(descriptor, path, file_bytes, free);
  } catch (...) {
    remove_if_same(descriptor, path);
    throw;
  }
  return opened;
}

ScratchFile::ScratchFile(const std::string& path, std::uint64_t data_bytes)
    : ScratchFile(
          [&] {
            if (data_bytes == 0) {
              throw InvalidArgument("a scratch file cannot have 0 bytes: " + path);
            }
            return make(path, kHeaderBytes + align_up(data_bytes, kHeaderBytes));
          }(),
          path, align_up(data_bytes, kHeaderBytes)) {}

ScratchFile ScratchFile::in_memory(std::uint64_t data_bytes) {
  const std::string name = "memory that is not page-locked";
  const std::uint64_t bytes = align_up(data_bytes, kHeaderBytes);
  // As glibc's memfd_create, whose header is that of mappings.
  UniqueFd descriptor(static_cast<int>(::syscall(SYS_memfd_create, "castor", MFD_CLOEXEC)));
  if (!descriptor) {
    throw IoError(errno, name, 0, "cannot make a file in memory");
  }
  const auto length = static_cast<off_t>(kHeaderBytes + bytes);
  if (without_interruption([&] { return ::fallocate(descriptor.get(), 0, 0, length); }) != 0) {
    throw IoError(errno, name, 0, "cannot take " + format_bytes(bytes) + " of",
                  "Free memory, or train a smaller model");
  }
  ScratchFile file({.descriptor = std::move(descriptor)}, name, bytes);
  file.owner_ = 0;  // there is nothing to remove
  return file;
}

ScratchFile::ScratchFile(Opened opened, const std::string& path, std::uint64_t data_bytes)
    : origin_(opened.origin),
      file_(std::move(opened.descriptor), path),
      data_bytes_(data_bytes),
      owner_(::getpid()) {}

ScratchFile::ScratchFile(ScratchFile&& other) noexcept
    : origin_(other.origin_),
      file_(std::move(other.file_)),
      data_bytes_(other.data_bytes_),
      owner_(std::exchange(other.owner_, 0)) {}

ScratchFile::~ScratchFile() {
  try {
    close();
  } catch (const Error&) {
    // close() would have said so. The file stays, and the next job on this path reclaims it.
  }
}

void ScratchFile::close() {
  if (std::exchange(owner_, 0) == ::getpid()) {
    remove_if_same(file_.descriptor(), file_.path());
  }
}

std::uint64_t free_disk_bytes(const std::string& directory) {
  struct statvfs status = {};
  if (::statvfs(directory.c_str(), &status) != 0) {
    throw IoError(errno, directory, 0, "cannot ask for the free space of",
                  "Create the directory, or give another path");
  }
  return std::uint64_t{status.f_bavail} * status.f_frsize;
}

}  // namespace castor
