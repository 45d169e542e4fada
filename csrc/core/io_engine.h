#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace castor {

enum class IoOperation : std::uint8_t { kRead, kWrite };

/// One positioned transfer. The buffer stays alive until the completion with this tag is collected;
/// a write does not change it. On a file opened with O_DIRECT, buffer, size and offset are
/// multiples of the file's alignment.
struct IoRequest {
  IoOperation operation = IoOperation::kRead;
  std::uint32_t file = 0;  ///< index into the files that the engine was made with
  std::uint64_t offset = 0;
  std::span<std::byte> buffer;
  std::uint64_t tag = 0;  ///< comes back in the completion
};

/// One finished transfer. A value, never an exception: short transfers and errors are ordinary
/// outcomes that the caller must look at. io/transfer_queue.h is the caller that continues, retries
/// and raises.
struct IoCompletion {
  std::uint64_t tag = 0;
  std::size_t expected_bytes = 0;
  std::size_t transferred_bytes = 0;
  int error_number = 0;  ///< errno; 0 when the transfer succeeded, in full or in part

  [[nodiscard]] bool complete() const noexcept {
    return error_number == 0 && transferred_bytes == expected_bytes;
  }
};

/// Seam for the NVMe tier: batches of reads and writes, completed in any order. Implementations in
/// csrc/io: io_uring, and threads that call pread and pwrite. The files are borrowed and stay open.
///
/// One thread at a time calls an engine; wake() alone may come from any thread. Destruction waits
/// for the transfers in flight.
class IoEngine {
 public:
  virtual ~IoEngine() = default;

  /// Starts all requests. Throws InvalidArgument, and starts none, when more than queue_depth()
  /// would be in flight or a file does not exist; IoError when the kernel refuses the submission.
  virtual void submit(std::span<const IoRequest> requests) = 0;

  /// Appends finished transfers to `completions`; blocks until at least `at_least` of them have
  /// finished (all in flight, if they are fewer), or until somebody calls wake().
  virtual void collect(std::size_t at_least, std::vector<IoCompletion>& completions) = 0;

  /// Makes a collect() that waits, or the next one, return early. Several calls may count as one:
  /// after each collect() the caller looks for what it may have been woken for. Thread-safe.
  virtual void wake() noexcept = 0;

  [[nodiscard]] virtual std::size_t queue_depth() const noexcept = 0;
  [[nodiscard]] virtual std::size_t in_flight() const noexcept = 0;

  /// Returns a description for reports: "io_uring, depth 64, 2 files and 1 buffer registered".
  [[nodiscard]] virtual std::string description() const = 0;
};

}  // namespace castor
