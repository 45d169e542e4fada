#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/executor.h"
#include "io/scratch_space.h"
#include "io/transfer_queue.h"

namespace castor {

enum class PayloadContents {
  kNone,    ///< never written
  kStored,  ///< what was written last, whole
  kTorn,    ///< a write failed on the way: part old, part new, part neither
};

enum class Verification { kOff, kOn };

/// Brings bytes that are in no file: other ranks have them. Seam: WeightParts in csrc/dist, fakes
/// in tests. Thread-safe.
class PayloadSource {
 public:
  virtual ~PayloadSource() = default;
  /// Starts to bring all bytes of a payload, by its number there, into `buffer`, which stays until
  /// the transfer has ended. What cannot be brought is the transfer's error.
  [[nodiscard]] virtual IoTransfer start_read(std::size_t number, std::span<std::byte> buffer) = 0;
};

/// A chunk's payload (master, exp_avg, ...) on NVMe: its extent, the checksums of what was written,
/// and whether it can be trusted. Move-only. One thread at a time; the space outlives it.
///
/// Transfers go between the extent and an aligned buffer of padded_bytes(); bytes beyond bytes()
/// are written as zeros and are not checked.
class StoredPayload {
 public:
  /// `name` is for messages: "exp_avg of chunk 12". Throws InvalidArgument for 0 bytes, OutOfMemory
  /// of tier nvme.
  StoredPayload(ScratchSpace& space, std::string name, std::size_t bytes);

  /// One that is read from `source`, which outlives it, and never written.
  StoredPayload(PayloadSource& source, std::size_t number, std::string name, std::size_t bytes)
      : source_(&source),
        number_(number),
        name_(std::move(name)),
        bytes_(bytes),
        contents_(PayloadContents::kStored) {}

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t padded_bytes() const noexcept {
    return source_ != nullptr ? bytes_ : static_cast<std::size_t>(extent_.bytes());
  }
  [[nodiscard]] PayloadContents contents() const noexcept { return contents_; }

  /// Of a PayloadSource, not of a file: nothing of it is checked or written.
  [[nodiscard]] bool sourced() const noexcept { return source_ != nullptr; }
  /// Starts to read into `buffer`, from there.
  [[nodiscard]] IoTransfer start_read(std::span<std::byte> buffer) const {
    return source_->start_read(number_, buffer);
  }

  /// Starts to read into `buffer`, of padded_bytes(). Throws UsageError when there is nothing whole
  /// to read. check() belongs to it, after the wait.
  [[nodiscard]] IoTransfer start_read(TransferQueue& queue, std::span<std::byte> buffer) const;
  /// Compares what was read with what was written. Throws CorruptionError.
  void check(Executor& executor, const TransferQueue& queue, std::span<std::byte> buffer) const;

  /// Starts to write `buffer`, of padded_bytes(), and clears what lies beyond bytes(). The payload
  /// is torn until finish_write(). With kOff it gets no checksums, and later checks pass.
  [[nodiscard]] IoTransfer start_write(TransferQueue& queue, Executor& executor,
                                       std::span<std::byte> buffer, Verification verification);
  /// To be called when the write's wait() has returned.
  void finish_write() noexcept { contents_ = PayloadContents::kStored; }
  /// As if it had never been written. No transfer is under way.
  void discard() noexcept {
    contents_ = PayloadContents::kNone;
    checksums_.clear();
  }

 private:
  void check_size(std::span<std::byte> buffer) const;

  const ScratchSpace* space_ = nullptr;
  PayloadSource* source_ = nullptr;
  std::size_t number_ = 0;
  std::string name_;
  std::size_t bytes_;
  ScratchExtent extent_;
  PayloadContents contents_ = PayloadContents::kNone;
  std::vector<std::uint64_t> checksums_;  // empty: written without
};

}  // namespace castor
