#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "io/direct_file.h"

namespace castor {

/// State of a scratch file's path when it was opened.
enum class ScratchOrigin {
  kNew,
  kReclaimed,  ///< there was the file of a job that ended without removing it: a crash, a kill
};

/// A preallocated, exclusively locked file for data that does not outlive the process.
///
/// All its space is taken at the start, so that a full disk is found then and not in step 400. A
/// header (magic, version, owner, checksum) tells castor's own files from foreign ones; a file that
/// is not castor's is never written to.
///
/// The lock (flock) ends with the process, however that ends. The next job on that path reclaims a
/// file that stays behind. It waits some seconds for a lock whose owner is gone, because the
/// owner's children, or the kernel, may have the lock still.
///
/// close() and the destructor remove the file, in the process that made it: a forked child leaves
/// it alone.
///
/// Throws IoError: ENOENT, EACCES, EROFS (the directory), EBUSY (another job has it), EEXIST (a
/// foreign file), ENOSPC, EDQUOT, EFBIG (space), each with the remedy. Not thread-safe; file() is.
class ScratchFile {
 public:
  /// Makes the file `path`, whose directory exists. `data_bytes` > 0 is rounded up to whole blocks
  /// of 64 KiB.
  ScratchFile(const std::string& path, std::uint64_t data_bytes);
  /// Makes a file without a path, in pageable memory, which goes with the object. Throws IoError
  /// where the system has no memory for it.
  [[nodiscard]] static ScratchFile in_memory(std::uint64_t data_bytes);
  ScratchFile(ScratchFile&& other) noexcept;
  ScratchFile& operator=(ScratchFile&&) = delete;
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile();

  [[nodiscard]] const DirectFile& file() const noexcept { return file_; }
  [[nodiscard]] ScratchOrigin origin() const noexcept { return origin_; }
  [[nodiscard]] static constexpr std::uint64_t data_begin() noexcept { return kHeaderBytes; }
  [[nodiscard]] std::uint64_t data_bytes() const noexcept { return data_bytes_; }

  /// Removes the file and gives its space back; transfers must have ended. Throws IoError.
  void close();

 private:
  /// Bytes of the header's space, to which sizes are rounded: a multiple of any device's block.
  static constexpr std::uint64_t kHeaderBytes = 64 * 1024;

  struct Opened;
  ScratchFile(Opened opened, const std::string& path, std::uint64_t data_bytes);
  static Opened make(const std::string& path, std::uint64_t file_bytes);
  static Opened open_locked(const std::string& path);

  ScratchOrigin origin_;
  DirectFile file_;
  std::uint64_t data_bytes_;
  pid_t owner_;  // 0 once removed or moved from
};

/// Returns the bytes that the file system of `directory` has left for this user. Throws IoError.
[[nodiscard]] std::uint64_t free_disk_bytes(const std::string& directory);

}  // namespace castor
