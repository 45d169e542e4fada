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
  kStored,  ///< the last write, complete
  kTorn,    ///< a write failed on the way: any mixture of old, new and other bytes
};

enum class Verification { kOff, kOn };

/// Source of bytes that are in no file because other ranks have them. Seam: WeightShards in
/// csrc/ranks, fakes in tests. Thread-safe.
class PayloadSource {
 public:
  virtual ~PayloadSource() = default;
  /// Starts to read all bytes of a payload, given by its number in the source, into `buffer`, which
  /// stays in place until the transfer has ended. A failure is the error of the transfer.
  [[nodiscard]] virtual IoTransfer start_read(std::size_t number, std::span<std::byte> buffer) = 0;
};

/// A chunk's payload (master, exp_avg, ...) on NVMe: its extent, the checksums of the bytes that
/// were written, and whether they can be trusted. Move-only. Used by one thread at a time; the
/// space outlives it.
///
/// Transfers go between the extent and an aligned buffer of padded_bytes(). Bytes beyond bytes()
/// are written as zeros and are not checked.
class StoredPayload {
 public:
  /// Allocates the payload's extent. `name` is for messages: "exp_avg of chunk 12". Throws
  /// InvalidArgument for 0 bytes, OutOfMemory of tier nvme.
  StoredPayload(ScratchSpace& space, std::string name, std::size_t bytes);

  /// Makes a payload that is read from `source`, which outlives it, and never written.
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

  /// Returns whether the payload is of a PayloadSource, not of a file. Such a payload is never
  /// checked or written.
  [[nodiscard]] bool sourced() const noexcept { return source_ != nullptr; }
  /// Starts to read from the PayloadSource into `buffer`.
  [[nodiscard]] IoTransfer start_read(std::span<std::byte> buffer) const {
    return source_->start_read(number_, buffer);
  }

  /// Starts to read into `buffer`, of padded_bytes(). Throws UsageError when there is nothing
  /// complete to read. After the wait, check() must follow.
  [[nodiscard]] IoTransfer start_read(TransferQueue& queue, std::span<std::byte> buffer) const;
  /// Compares the bytes that were read with the checksums of those that were written. Throws
  /// CorruptionError.
  void check(Executor& executor, const TransferQueue& queue, std::span<std::byte> buffer) const;

  /// Starts to write `buffer`, of padded_bytes(), and clears its bytes beyond bytes(). The payload
  /// is torn until finish_write(). With kOff it gets no checksums, and later checks pass.
  [[nodiscard]] IoTransfer start_write(TransferQueue& queue, Executor& executor,
                                       std::span<std::byte> buffer, Verification verification);
  /// Marks the payload as stored; to be called when the write's wait() has returned.
  void finish_write() noexcept { contents_ = PayloadContents::kStored; }
  /// Returns the payload to the state before its first write. No transfer is under way.
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
  std::vector<std::uint64_t> checksums_;  // empty: the bytes were written without any
};

}  // namespace castor
