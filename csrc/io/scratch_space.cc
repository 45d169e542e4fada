#include "io/scratch_space.h"

#include <algorithm>
#include <cassert>
#include <exception>
#include <filesystem>
#include <set>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

std::vector<ScratchFile> make_files(const ScratchOptions& options) {
  const std::size_t count = options.in_memory ? 1 : options.directories.size();
  if (count == 0) {
    throw InvalidArgument("the NVMe tier needs a directory, and none was given");
  }
  if (options.bytes == 0) {
    throw InvalidArgument("the NVMe tier cannot have 0 bytes");
  }
  if (options.stripe_bytes == 0 || options.stripe_bytes % kIoAlignment != 0) {
    throw InvalidArgument("stripes of " + std::to_string(options.stripe_bytes) +
                          " bytes are no multiple of " + std::to_string(kIoAlignment));
  }
  std::set<std::filesystem::path> seen;
  for (const std::string& directory : options.directories) {
    std::error_code ignored;  // what does not exist is the scratch file's to report
    if (!seen.insert(std::filesystem::weakly_canonical(directory, ignored)).second) {
      throw InvalidArgument("the directory " + directory +
                            " was given twice: each scratch file needs one of its own");
    }
  }
  // Whole stripes in each, so that the address space has no holes.
  const std::uint64_t each = align_up((options.bytes + count - 1) / count, options.stripe_bytes);
  std::vector<ScratchFile> files;
  files.reserve(count);
  if (options.in_memory) {
    files.push_back(ScratchFile::in_memory(each));
    return files;
  }
  for (const std::string& directory : options.directories) {
    files.emplace_back((std::filesystem::path(directory) / options.file_name).string(), each);
  }
  return files;
}

std::size_t largest_alignment(std::span<const ScratchFile> files) {
  std::size_t alignment = kIoAlignment;
  for (const ScratchFile& file : files) {
    alignment = std::max(alignment, file.file().alignment());
  }
  return alignment;
}

std::uint64_t capacity_of(std::span<const ScratchFile> files, std::uint64_t stripe_bytes) {
  return files.front().data_bytes() / stripe_bytes * stripe_bytes * files.size();
}

}  // namespace

ScratchExtent& ScratchExtent::operator=(ScratchExtent&& other) noexcept {
  if (this != &other) {
    reset();
    space_ = std::exchange(other.space_, nullptr);
    extent_ = std::exchange(other.extent_, {});
  }
  return *this;
}

void ScratchExtent::reset() noexcept {
  if (space_ != nullptr) {
    std::exchange(space_, nullptr)->free(std::exchange(extent_, {}));
  }
}

ScratchSpace::ScratchSpace(const ScratchOptions& options)
    : stripe_bytes_(options.stripe_bytes),
      files_(make_files(options)),
      alignment_(largest_alignment(files_)),
      allocator_(capacity_of(files_, stripe_bytes_), alignment_) {
  if (stripe_bytes_ % alignment_ != 0) {
    throw InvalidArgument("stripes of " + format_bytes(stripe_bytes_) + " are no multiple of the " +
                          std::to_string(alignment_) + " bytes that the device transfers");
  }
}

ScratchExtent ScratchSpace::allocate(std::uint64_t bytes, const std::string& remedy) {
  const MutexLock lock(mutex_);
  const auto extent = allocator_.try_allocate(bytes);
  if (!extent) {
    throw OutOfMemory(TierKind::kNvme, bytes, allocator_.largest_free(), allocator_.capacity(),
                      remedy);
  }
  return {*this, *extent};
}

void ScratchSpace::free(const Extent& extent) noexcept {
  const MutexLock lock(mutex_);
  allocator_.free(extent);
}

std::vector<TransferPiece> ScratchSpace::pieces(std::uint64_t offset,
                                                std::span<std::byte> buffer) const {
  if (offset > capacity() || buffer.size() > capacity() - offset) {
    throw InvalidArgument(std::to_string(buffer.size()) + " bytes at byte " +
                          std::to_string(offset) + " reach beyond the NVMe tier's " +
                          std::to_string(capacity()));
  }
  std::vector<TransferPiece> found;
  while (!buffer.empty()) {
    const std::uint64_t stripe = offset / stripe_bytes_;
    const std::uint64_t inside = offset % stripe_bytes_;
    const std::size_t bytes = std::min<std::uint64_t>(buffer.size(), stripe_bytes_ - inside);
    const auto file = static_cast<std::uint32_t>(stripe % files_.size());
    const std::uint64_t file_offset =
        ScratchFile::data_begin() + stripe / files_.size() * stripe_bytes_ + inside;
    // With one file all stripes follow each other: the transfer queue cuts its own blocks.
    if (!found.empty() && files_.size() == 1) {
      found.back().buffer = {found.back().buffer.data(), found.back().buffer.size() + bytes};
    } else {
      found.push_back({file, file_offset, buffer.first(bytes)});
    }
    buffer = buffer.subspan(bytes);
    offset += bytes;
  }
  return found;
}

std::vector<IoFile> ScratchSpace::io_files() const {
  std::vector<IoFile> found;
  for (const ScratchFile& file : files_) {
    found.push_back({file.file().descriptor(), file.file().path()});
  }
  return found;
}

std::vector<TransferFile> ScratchSpace::transfer_files() const {
  std::vector<TransferFile> found;
  for (const ScratchFile& file : files_) {
    found.push_back({file.file().path(), file.file().alignment()});
  }
  return found;
}

std::uint64_t ScratchSpace::capacity() const {
  const MutexLock lock(mutex_);
  return allocator_.capacity();
}

std::uint64_t ScratchSpace::used_bytes() const {
  const MutexLock lock(mutex_);
  return allocator_.used_bytes();
}

std::uint64_t ScratchSpace::peak_bytes() const {
  const MutexLock lock(mutex_);
  return allocator_.peak_bytes();
}

std::string ScratchSpace::description() const {
  std::string text = std::to_string(files_.size()) +
                     (files_.size() == 1 ? " file of " : " files of ") +
                     format_bytes(files_.front().data_bytes()) + ": ";
  for (std::size_t i = 0; i < files_.size(); ++i) {
    text += (i == 0 ? "" : ", ") + files_[i].file().description();
  }
  return text;
}

void ScratchSpace::close() {
  std::exception_ptr first;
  for (ScratchFile& file : files_) {
    try {
      file.close();
    } catch (const IoError&) {
      first = first ? first : std::current_exception();
    }
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

}  // namespace castor
