#include "io/stored_payload.h"

#include <algorithm>

#include "core/error.h"
#include "core/units.h"
#include "io/checksum.h"

namespace castor {

StoredPayload::StoredPayload(ScratchSpace& space, std::string name, std::size_t bytes)
    : space_(&space),
      name_(std::move(name)),
      bytes_(bytes),
      extent_(space.allocate(
          bytes, "Give the NVMe tier more bytes (nvme_memory), or move less there: " + name_ +
                     " has no room")) {}

void StoredPayload::check_size(std::span<std::byte> buffer) const {
  if (buffer.size() != padded_bytes()) {
    throw InvalidArgument(name_ + " takes " + std::to_string(padded_bytes()) +
                          " bytes on NVMe, and a buffer of " + std::to_string(buffer.size()) +
                          " was given");
  }
}

IoTransfer StoredPayload::start_read(TransferQueue& queue, std::span<std::byte> buffer) const {
  check_size(buffer);
  if (contents_ == PayloadContents::kNone) {
    throw UsageError(name_ + " was never written to NVMe and cannot be read");
  }
  if (contents_ == PayloadContents::kTorn) {
    throw UsageError(name_ +
                     " is half-written on NVMe, because its last write failed: load a "
                     "checkpoint");
  }
  const auto pieces = space_->pieces(extent_.offset(), buffer);
  return queue.submit(IoOperation::kRead, pieces);
}

void StoredPayload::check(Executor& executor, const TransferQueue& queue,
                          std::span<std::byte> buffer) const {
  check_size(buffer);
  if (checksums_.empty()) {
    return;
  }
  if (const auto mismatch = find_mismatch(executor, buffer.first(bytes_), checksums_)) {
    // With several files the piece may be spread over them: the first one is named.
    const auto pieces = space_->pieces(extent_.offset() + mismatch->offset,
                                       buffer.subspan(mismatch->offset, mismatch->bytes));
    throw CorruptionError(name_ + " (its byte " + std::to_string(mismatch->offset) + ")",
                          queue.path(pieces.front().file), pieces.front().offset, mismatch->bytes,
                          mismatch->expected, mismatch->found);
  }
}

IoTransfer StoredPayload::start_write(TransferQueue& queue, Executor& executor,
                                      std::span<std::byte> buffer, Verification verification) {
  check_size(buffer);
  std::fill(buffer.begin() + static_cast<std::ptrdiff_t>(bytes_), buffer.end(), std::byte{0});
  checksums_.clear();
  if (verification == Verification::kOn) {
    checksums_ = block_checksums(executor, buffer.first(bytes_));
  }
  const auto pieces = space_->pieces(extent_.offset(), buffer);
  contents_ = PayloadContents::kTorn;
  return queue.submit(IoOperation::kWrite, pieces);
}

}  // namespace castor
