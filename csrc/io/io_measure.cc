#include "io/io_measure.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "io/aligned_buffer.h"
#include "io/transfer_queue.h"

namespace castor {
namespace {

using Clock = std::chrono::steady_clock;

/// Not zeros: some devices and file systems store those for free.
void fill_with_noise(std::span<std::byte> memory) {
  std::uint64_t state = 0x9e3779b97f4a7c15;
  const std::size_t fresh = std::min(memory.size(), kMiB);
  for (std::byte& value : memory.first(fresh)) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    value = static_cast<std::byte>(state >> 56);
  }
  for (std::size_t done = fresh; done < memory.size(); done += fresh) {
    std::copy_n(memory.begin(), std::min(fresh, memory.size() - done),
                memory.begin() + static_cast<std::ptrdiff_t>(done));
  }
}

void check(const IoWorkload& workload, const DirectFile& file) {
  if (workload.block_bytes == 0 || workload.block_bytes % file.alignment() != 0 ||
      workload.begin % file.alignment() != 0) {
    throw InvalidArgument("blocks of " + std::to_string(workload.block_bytes) +
                          " bytes from byte " + std::to_string(workload.begin) +
                          " on are no multiples of the " + std::to_string(file.alignment()) +
                          " bytes that " + file.path() + " is transferred in");
  }
  if (workload.depth == 0 || workload.bytes < workload.block_bytes ||
      !(workload.seconds > 0.0 && workload.seconds <= 3600.0)) {
    throw InvalidArgument(
        "a measurement needs a depth of 1 or more, a range of at least a block, "
        "and 0 to 3600 seconds; depth is " +
        std::to_string(workload.depth) + ", the range " + format_bytes(workload.bytes) +
        ", a block " + format_bytes(workload.block_bytes));
  }
}

class Measurement {
 public:
  Measurement(IoEngineKind kind, const DirectFile& file, const IoWorkload& workload)
      : file_(file),
        workload_(workload),
        num_blocks_(workload.bytes / workload.block_bytes),
        memory_(workload.depth * workload.block_bytes, file.alignment()) {
    fill_with_noise(memory_.span());
    const std::span<std::byte> buffers[] = {memory_.span()};
    engine_ = make_io_engine(kind, {{file.descriptor(), file.path()}}, workload.depth, buffers);
    operations_.resize(workload.depth);
  }

  IoMeasurement run() {
    IoMeasurement result;
    const auto start = Clock::now();
    const auto deadline = start + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(workload_.seconds));
    std::vector<IoRequest> requests;
    for (std::size_t slot = 0; slot < workload_.depth; ++slot) {
      requests.push_back(next(slot));
    }
    engine_->submit(requests);
    auto now = start;
    std::vector<IoCompletion> completions;
    while (engine_->in_flight() > 0) {
      completions.clear();
      engine_->collect(1, completions);
      now = Clock::now();
      requests.clear();
      for (const IoCompletion& completion : completions) {
        count(completion, result);
        if (now < deadline || in_need_of_the_other()) {
          requests.push_back(next(completion.tag));
        }
      }
      engine_->submit(requests);
    }
    result.seconds = std::chrono::duration<double>(now - start).count();
    result.engine = engine_->description();
    return result;
  }

 private:
  [[nodiscard]] bool in_need_of_the_other() const noexcept {
    return workload_.mix == IoMix::kMixed && num_issued_ < 2;
  }

  IoRequest next(std::size_t slot) {
    const bool mixed_read = workload_.mix == IoMix::kMixed && num_issued_++ % 2 == 0;
    const IoOperation operation =
        workload_.mix == IoMix::kRead || mixed_read ? IoOperation::kRead : IoOperation::kWrite;
    std::uint64_t& position = operation == IoOperation::kRead ? next_read_ : next_write_;
    const std::uint64_t block = position++ % num_blocks_;
    operations_[slot] = operation;
    return {operation, 0, workload_.begin + block * workload_.block_bytes,
            memory_.span().subspan(slot * workload_.block_bytes, workload_.block_bytes), slot};
  }

  void count(const IoCompletion& completion, IoMeasurement& result) const {
    if (!completion.complete()) {
      throw IoError(completion.error_number != 0 ? completion.error_number : EIO, file_.path(),
                    workload_.begin,
                    "a measured transfer came to " + std::to_string(completion.transferred_bytes) +
                        " of " + std::to_string(completion.expected_bytes) + " bytes:");
    }
    (operations_[completion.tag] == IoOperation::kRead ? result.read_bytes
                                                       : result.written_bytes) +=
        completion.transferred_bytes;
  }

  const DirectFile& file_;
  const IoWorkload& workload_;
  const std::uint64_t num_blocks_;
  AlignedBuffer memory_;
  std::vector<IoOperation> operations_;  // by slot
  std::uint64_t num_issued_ = 0;
  std::uint64_t next_read_ = 0;
  std::uint64_t next_write_ = 0;
  std::unique_ptr<IoEngine> engine_;  // last: what is in flight ends before the memory goes
};

}  // namespace

IoMix parse_io_mix(std::string_view name) {
  if (name == "read") {
    return IoMix::kRead;
  }
  if (name == "write") {
    return IoMix::kWrite;
  }
  if (name == "mixed") {
    return IoMix::kMixed;
  }
  throw InvalidArgument("unknown I/O mix '" + std::string(name) +
                        "': use 'read', 'write' or 'mixed'");
}

IoMeasurement measure_io(IoEngineKind kind, const DirectFile& file, const IoWorkload& workload) {
  check(workload, file);
  return Measurement(kind, file, workload).run();
}

void fill_range(IoEngineKind kind, const DirectFile& file, std::uint64_t begin,
                std::uint64_t bytes) {
  constexpr std::size_t kBlockBytes = kMiB;
  constexpr std::size_t kBatch = 32;
  const AlignedBuffer memory(kBatch * kBlockBytes, file.alignment());
  fill_with_noise(memory.span());
  TransferQueue queue(make_io_engine(kind, {{file.descriptor(), file.path()}}, kBatch),
                      {{file.path(), file.alignment()}}, kBlockBytes);
  for (std::uint64_t done = 0; done < bytes; done += memory.span().size()) {
    const TransferPiece piece{
        .file = 0,
        .offset = begin + done,
        .buffer = memory.span().first(std::min<std::uint64_t>(memory.span().size(), bytes - done))};
    queue.submit(IoOperation::kWrite, {&piece, 1}).wait();
  }
}

}  // namespace castor
