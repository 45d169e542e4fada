#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/mutex.h"
#include "io/extent_allocator.h"
#include "io/io_file.h"
#include "io/scratch_file.h"
#include "io/transfer_queue.h"

namespace castor {

class ScratchSpace;

/// An extent that goes back to its space when it is destroyed. Move-only. The space outlives it,
/// and transfers on it have ended by then.
class ScratchExtent {
 public:
  ScratchExtent() = default;
  ScratchExtent(ScratchSpace& space, const Extent& extent) : space_(&space), extent_(extent) {}
  ScratchExtent(ScratchExtent&& other) noexcept
      : space_(std::exchange(other.space_, nullptr)), extent_(std::exchange(other.extent_, {})) {}
  ScratchExtent& operator=(ScratchExtent&& other) noexcept;
  ScratchExtent(const ScratchExtent&) = delete;
  ScratchExtent& operator=(const ScratchExtent&) = delete;
  ~ScratchExtent() { reset(); }

  [[nodiscard]] std::uint64_t offset() const noexcept { return extent_.offset; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return extent_.bytes; }
  void reset() noexcept;

 private:
  ScratchSpace* space_ = nullptr;
  Extent extent_;
};

struct ScratchOptions {
  /// Directories with one scratch file each; several should lie on different devices.
  std::vector<std::string> directories;
  /// Whether one file in memory takes the place of all of them (ScratchFile::in_memory).
  bool in_memory = false;
  /// Name of the scratch file in each directory. Ranks that share a directory need names of their
  /// own.
  std::string file_name = "castor.scratch";
  /// Bytes of all files together.
  std::uint64_t bytes = 0;
  /// Bytes of a stripe, a multiple of kIoAlignment. Consecutive stripes lie in different files.
  std::uint64_t stripe_bytes = std::uint64_t{1} << 20;
};

/// The bytes of the NVMe tier: one address space over the scratch files of one or several
/// directories. The space is striped, so that every large extent has the bandwidth of all of them.
///
/// Owned by the runtime; transfers have ended when it is destroyed. Thread-safe.
class ScratchSpace {
 public:
  /// Makes the scratch files. Throws InvalidArgument (no directory, the same one twice, no bytes),
  /// and what ScratchFile throws.
  explicit ScratchSpace(const ScratchOptions& options);

  /// Allocates an extent. Throws OutOfMemory of tier nvme, with `remedy`, when no free range is
  /// long enough.
  [[nodiscard]] ScratchExtent allocate(std::uint64_t bytes, const std::string& remedy);

  /// Returns the ranges of files where `buffer` lies when it begins at `offset` of this space: a
  /// piece per stripe. Throws InvalidArgument when the buffer reaches beyond the end.
  [[nodiscard]] std::vector<TransferPiece> pieces(std::uint64_t offset,
                                                  std::span<std::byte> buffer) const;

  [[nodiscard]] std::vector<IoFile> io_files() const;
  [[nodiscard]] std::vector<TransferFile> transfer_files() const;
  /// Returns the alignment, in bytes, of the sizes and buffers of transfers.
  [[nodiscard]] std::size_t alignment() const noexcept { return alignment_; }
  [[nodiscard]] std::uint64_t capacity() const;
  [[nodiscard]] std::uint64_t used_bytes() const;
  [[nodiscard]] std::uint64_t peak_bytes() const;
  [[nodiscard]] std::span<const ScratchFile> files() const noexcept { return files_; }
  /// Returns text like "2 files, 1.00 GiB each: /a/castor.scratch (O_DIRECT), ...".
  [[nodiscard]] std::string description() const;

  /// Removes the files. Throws the first IoError, after it has tried to remove all of them.
  void close();

 private:
  friend class ScratchExtent;
  void free(const Extent& extent) noexcept;

  const std::uint64_t stripe_bytes_;
  std::vector<ScratchFile> files_;
  std::size_t alignment_;
  mutable Mutex mutex_;
  ExtentAllocator allocator_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
