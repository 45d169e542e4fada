#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/io_engine.h"
#include "io/aligned_buffer.h"

namespace castor::test {

/// What an adversary does to one operation.
struct Fault {
  enum class Kind {
    kErrno,    ///< not done; `value` is the errno
    kShort,    ///< `value` bytes less than asked for are reported, and whole blocks less are done;
               ///< of a read one byte at least, because none means the end of the file
    kBitFlip,  ///< done, with one bit of the data flipped on its way
    kDelay,    ///< done; its completion is held back until `value` others, or all, have been given
  };
  Kind kind = Kind::kErrno;
  std::uint64_t value = 0;
  std::uint64_t first = 0;  ///< operations are counted from 0, retries included
  std::uint64_t count = 1;  ///< so many operations in a row from the first on
};

/// Wraps any engine and spoils the operations that it is told to. With `shuffle_seed` it gives the
/// completions of each collect() in a random order.
class FaultyIoEngine final : public IoEngine {
 public:
  FaultyIoEngine(std::unique_ptr<IoEngine> inner, std::vector<Fault> faults,
                 std::uint64_t shuffle_seed = 0)
      : inner_(std::move(inner)), faults_(std::move(faults)), shuffle_seed_(shuffle_seed) {}

  void submit(std::span<const IoRequest> requests) override {
    std::vector<IoRequest> passed;
    for (IoRequest request : requests) {
      const Fault* const fault = fault_of(num_operations_++);
      if (fault != nullptr && fault->kind == Fault::Kind::kErrno) {
        made_up_.push_back({.tag = request.tag,
                            .expected_bytes = request.buffer.size(),
                            .error_number = static_cast<int>(fault->value)});
        continue;
      }
      const std::span<std::byte> whole = request.buffer;
      std::size_t reported = whole.size();
      if (fault != nullptr && fault->kind == Fault::Kind::kShort) {
        reported -= std::min<std::size_t>(fault->value, reported);
        if (request.operation == IoOperation::kRead) {
          reported = std::max<std::size_t>(reported, 1);
        }
        const std::size_t done = (reported + 4095) / 4096 * 4096;
        if (done == 0) {
          made_up_.push_back({.tag = request.tag, .expected_bytes = request.buffer.size()});
          continue;
        }
        request.buffer = request.buffer.first(std::min(done, request.buffer.size()));
      }
      std::unique_ptr<AlignedBuffer> flipped;
      if (fault != nullptr && fault->kind == Fault::Kind::kBitFlip &&
          request.operation == IoOperation::kWrite) {
        flipped = std::make_unique<AlignedBuffer>(whole.size(), 4096);
        std::copy(whole.begin(), whole.end(), flipped->data());
        flipped->data()[0] ^= std::byte{0x10};
        request.buffer = flipped->span();
      }
      const std::uint64_t tag = records_.size();
      records_.push_back({request.tag, whole, reported, fault, std::move(flipped)});
      request.tag = tag;
      passed.push_back(request);
    }
    if (!passed.empty()) {
      inner_->submit(passed);
    }
  }

  void collect(std::size_t at_least, std::vector<IoCompletion>& completions) override {
    const std::size_t before = completions.size();
    completions.insert(completions.end(), made_up_.begin(), made_up_.end());
    made_up_.clear();
    const std::size_t made_up = completions.size() - before;
    std::vector<IoCompletion> real;
    inner_->collect(at_least > made_up ? at_least - made_up : 0, real);
    for (const IoCompletion& completion : real) {
      take(completion, completions);
    }
    release(completions.size() - before, completions);
    if (shuffle_seed_ != 0) {
      std::shuffle(completions.begin() + static_cast<std::ptrdiff_t>(before), completions.end(),
                   std::mt19937_64(shuffle_seed_++));
    }
  }

  void wake() noexcept override { inner_->wake(); }
  [[nodiscard]] std::size_t queue_depth() const noexcept override { return inner_->queue_depth(); }
  [[nodiscard]] std::size_t in_flight() const noexcept override {
    return inner_->in_flight() + made_up_.size() + held_.size();
  }
  [[nodiscard]] std::string description() const override {
    return "faulty " + inner_->description();
  }
  [[nodiscard]] std::uint64_t num_operations() const noexcept { return num_operations_; }

 private:
  struct Record {
    std::uint64_t tag;
    std::span<std::byte> buffer;
    std::size_t reported;
    const Fault* fault;
    std::unique_ptr<AlignedBuffer> flipped;  // what a write with a flipped bit writes
  };
  struct Held {
    IoCompletion completion;
    std::uint64_t remaining;
  };

  [[nodiscard]] const Fault* fault_of(std::uint64_t operation) const {
    for (const Fault& fault : faults_) {
      if (operation >= fault.first && operation - fault.first < fault.count) {
        return &fault;
      }
    }
    return nullptr;
  }

  void take(IoCompletion completion, std::vector<IoCompletion>& completions) {
    const Record& record = records_[completion.tag];
    completion.tag = record.tag;
    completion.expected_bytes = record.buffer.size();
    completion.transferred_bytes = std::min(completion.transferred_bytes, record.reported);
    if (record.fault != nullptr && record.fault->kind == Fault::Kind::kBitFlip &&
        record.flipped == nullptr) {
      record.buffer[0] ^= std::byte{0x10};
    }
    if (record.fault != nullptr && record.fault->kind == Fault::Kind::kDelay) {
      held_.push_back({completion, record.fault->value});
    } else {
      completions.push_back(completion);
    }
  }

  /// Gives what was held back long enough; all of it when nothing else is to come.
  void release(std::size_t given, std::vector<IoCompletion>& completions) {
    const bool last = inner_->in_flight() == 0;
    std::erase_if(held_, [&](Held& held) {
      held.remaining -= std::min<std::uint64_t>(held.remaining, given);
      if (held.remaining == 0 || last) {
        completions.push_back(held.completion);
        return true;
      }
      return false;
    });
  }

  std::unique_ptr<IoEngine> inner_;
  const std::vector<Fault> faults_;
  std::uint64_t shuffle_seed_;
  std::uint64_t num_operations_ = 0;
  std::vector<Record> records_;
  std::vector<IoCompletion> made_up_;
  std::vector<Held> held_;
};

}  // namespace castor::test
