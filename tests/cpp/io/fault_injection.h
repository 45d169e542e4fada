#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/io_engine.h"
#include "io/aligned_buffer.h"

namespace castor {

/// Fault that is injected into some of an engine's operations.
struct IoFault {
  enum class Kind : std::uint8_t {
    /// The operation is not done; `value` is the errno.
    kErrno,
    /// The operation reports `value` bytes less than asked for, and does less by whole blocks. A
    /// read still does one byte at least, because none means the end of the file.
    kShort,
    /// The operation is done, with one bit of the data flipped on its way.
    kBitFlip,
    /// The operation is done; its completion is held back until `value` others, or all, have been
    /// given.
    kDelay,
  };
  static constexpr std::uint64_t kForever = ~std::uint64_t{0};

  Kind kind = Kind::kErrno;
  std::uint64_t value = 0;
  /// Number of the first operation; operations are counted from 0 in the order of submission.
  std::uint64_t first = 0;
  /// Number of operations in a row from the first on; one that is tried again counts again.
  std::uint64_t count = 1;
  /// Only operations that are counted; nullopt counts all.
  std::optional<IoOperation> operation = std::nullopt;
};

/// Number of operations that engines were given, and of those that a fault was injected into.
struct IoFaultCounts {
  std::uint64_t reads = 0;
  std::uint64_t writes = 0;
  std::uint64_t faults = 0;
};

/// Sum of IoFaultCounts that several engines may add to. Thread-safe.
class IoFaultTally {
 public:
  void add(const IoFaultCounts& counts) noexcept;
  [[nodiscard]] IoFaultCounts counts() const noexcept;

 private:
  // Relaxed: counts that order nothing else.
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<std::uint64_t> writes_{0};
  std::atomic<std::uint64_t> faults_{0};
};

/// Parses a text into faults: "count" for none, or several of "OPERATION:N:FAULT" with commas
/// between them, such as "write:17:EIO,read:5+:short".
///
/// - OPERATION is read, write or any.
/// - N is the N-th such operation of an engine, from 1; with a "+" behind it, all later ones too.
/// - FAULT is an errno's name, short (the last 4 KiB are not transferred) or flip (one bit).
///
/// Throws InvalidArgument that quotes the text that it does not understand.
[[nodiscard]] std::vector<IoFault> parse_io_faults(std::string_view text);

/// Wraps any engine and spoils the operations that the faults name, like a failing disk, and at the
/// place where a disk would do it. Of several faults of one operation the first in the list counts.
/// A collect() that gets only delayed completions returns early, as if it were woken. description()
/// and counts() may be called by any thread, the other functions like those of every IoEngine.
class FaultyIoEngine final : public IoEngine {
 public:
  struct Options {
    /// Seed of a random order of the completions of a collect(); 0: no shuffling.
    std::uint64_t shuffle_seed = 0;
    IoFaultTally* total = nullptr;  ///< adds to these counts too; outlives the engine
  };

  FaultyIoEngine(std::unique_ptr<IoEngine> inner, std::vector<IoFault> faults, Options options);
  FaultyIoEngine(std::unique_ptr<IoEngine> inner, std::vector<IoFault> faults)
      : FaultyIoEngine(std::move(inner), std::move(faults), Options{}) {}

  void submit(std::span<const IoRequest> requests) override;
  void collect(std::size_t at_least, std::vector<IoCompletion>& completions) override;
  void wake() noexcept override { inner_->wake(); }
  [[nodiscard]] std::size_t queue_depth() const noexcept override { return inner_->queue_depth(); }
  [[nodiscard]] std::size_t in_flight() const noexcept override;
  /// Returns the inner engine's description, with the faults and counts() behind it.
  [[nodiscard]] std::string description() const override;

  [[nodiscard]] IoFaultCounts counts() const noexcept { return tally_.counts(); }

 private:
  /// A request in flight in the inner engine, where its tag is its index in slots_.
  struct Slot {
    std::uint64_t tag = 0;
    std::span<std::byte> buffer;
    std::size_t reported = 0;
    const IoFault* fault = nullptr;
    std::unique_ptr<AlignedBuffer> flipped;  // data that a write with a flipped bit writes
  };
  struct Held {
    IoCompletion completion;
    std::uint64_t remaining;
  };

  [[nodiscard]] const IoFault* fault_of(IoOperation operation, const IoFaultCounts& before) const;
  [[nodiscard]] std::optional<IoCompletion> spoil(IoRequest& request, Slot& slot) const;
  void take(IoCompletion completion, std::vector<IoCompletion>& completions);
  void release(std::size_t given, std::vector<IoCompletion>& completions);

  const std::vector<IoFault> faults_;
  const Options options_;
  std::mt19937_64 shuffle_;
  IoFaultTally tally_;
  std::vector<Slot> slots_;                // one for each transfer that the inner engine takes
  std::vector<std::size_t> free_slots_;    // places in slots_
  std::vector<IoCompletion> made_up_;      // completions of operations that were not done
  std::vector<Held> held_;                 // kDelay
  const std::unique_ptr<IoEngine> inner_;  // last: transfers in flight end before the memory goes
};

}  // namespace castor
