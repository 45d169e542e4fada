#include "io/transfer_queue.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <iterator>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {

/// What an IoError is made of. The exception itself is made by the thread that throws it: its
/// message must not be shared with another one.
struct IoFailure {
  int error_number = 0;
  std::string path;
  std::uint64_t offset = 0;
  std::string what;
  std::string remedy;

  [[noreturn]] void raise() const { throw IoError(error_number, path, offset, what, remedy); }
};

/// Shared by the handle and the blocks of a transfer.
struct TransferQueue::Blocks final : IoTransfer::State {
  Mutex mutex;
  std::condition_variable finished;
  std::size_t num_blocks CASTOR_GUARDED_BY(mutex) = 0;        // those that have not ended
  std::optional<IoFailure> failure CASTOR_GUARDED_BY(mutex);  // the first one

  [[nodiscard]] bool failed() {
    const MutexLock lock(mutex);
    return failure.has_value();
  }

  void end_block(std::optional<IoFailure> of_block) {
    const MutexLock lock(mutex);
    if (of_block && !failure) {
      failure = std::move(of_block);
    }
    if (--num_blocks == 0) {
      finished.notify_all();
    }
  }

  void wait() override {
    MutexLock lock(mutex);
    finished.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex) { return num_blocks == 0; });
    if (failure) {
      failure->raise();
    }
  }
  void drain() noexcept override {
    MutexLock lock(mutex);
    finished.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex) { return num_blocks == 0; });
  }
};

IoTransfer& IoTransfer::operator=(IoTransfer&& other) noexcept {
  if (this != &other) {
    drain();
    state_ = std::move(other.state_);
  }
  return *this;
}

void IoTransfer::wait() {
  if (!state_) {
    return;
  }
  std::exchange(state_, nullptr)->wait();
}

void IoTransfer::drain() noexcept {
  if (state_) {
    state_->drain();
  }
  state_.reset();
}

/// At most block_bytes of a piece: what one request transfers, or what is left of it.
struct TransferQueue::Block {
  std::shared_ptr<Blocks> transfer;
  IoOperation operation = IoOperation::kRead;
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::span<std::byte> buffer;
  std::size_t fruitless = 0;
};

struct TransferQueue::Driver {
  std::array<std::deque<Block>, 2> pending;    // reads, writes
  std::array<std::size_t, 2> num_in_flight{};  // reads, writes
  std::vector<Block> slots;                    // in flight; a request's tag is its place
  std::vector<std::uint32_t> free_slots;
  std::vector<IoRequest> requests;
  std::vector<IoCompletion> completions;

  [[nodiscard]] bool idle() const {
    return pending[0].empty() && pending[1].empty() && num_in_flight[0] + num_in_flight[1] == 0;
  }

  /// The kind that has fewer in flight, of those that wait.
  [[nodiscard]] std::optional<std::size_t> next_kind() const {
    if (pending[0].empty() && pending[1].empty()) {
      return std::nullopt;
    }
    if (pending[0].empty() || pending[1].empty()) {
      return pending[0].empty() ? 1 : 0;
    }
    return num_in_flight[0] <= num_in_flight[1] ? 0 : 1;
  }
};

namespace {

std::size_t kind_of(IoOperation operation) { return operation == IoOperation::kRead ? 0 : 1; }

std::string what_failed(IoOperation operation, std::size_t bytes) {
  const bool reads = operation == IoOperation::kRead;
  return std::string(reads ? "cannot read " : "cannot write ") + format_bytes(bytes) +
         (reads ? " of" : " to");
}

const char* remedy_for(int error_number) {
  switch (error_number) {
    case EIO:
    case ENODEV:
    case ENXIO: return "Check the device: dmesg, smartctl";
    case ENOSPC:
    case EDQUOT: return "Free space there, or give another path";
    case EINVAL: return "The file system may refuse O_DIRECT at this alignment";
    default: return "";
  }
}

}  // namespace

TransferQueue::TransferQueue(std::unique_ptr<IoEngine> engine, std::vector<TransferFile> files,
                             std::size_t block_bytes)
    : engine_(std::move(engine)), files_(std::move(files)), block_bytes_(block_bytes) {
  if (files_.empty()) {
    throw InvalidArgument("a transfer queue needs a file, and none was given");
  }
  for (const TransferFile& file : files_) {
    if (block_bytes == 0 || file.alignment == 0 || block_bytes % file.alignment != 0) {
      throw InvalidArgument("I/O blocks of " + format_bytes(block_bytes) +
                            " are no multiple of the " + std::to_string(file.alignment) +
                            " bytes that " + file.path + " is transferred in");
    }
  }
  thread_ = std::thread([this] { drive(); });
}

TransferQueue::~TransferQueue() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    if (driver_collects_) {
      engine_->wake();
    }
  }
  work_ready_.notify_one();
  thread_.join();
}

std::string TransferQueue::description() const {
  return engine_->description() + ", blocks of " + format_bytes(block_bytes_);
}

TransferQueue::Counts TransferQueue::counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

void TransferQueue::check(const TransferPiece& piece) const {
  if (piece.file >= files_.size()) {
    throw InvalidArgument("a transfer names file " + std::to_string(piece.file) +
                          " and there are " + std::to_string(files_.size()));
  }
  const TransferFile& file = files_[piece.file];
  const auto address = reinterpret_cast<std::uintptr_t>(piece.buffer.data());
  if (address % file.alignment != 0 || piece.buffer.size() % file.alignment != 0 ||
      piece.offset % file.alignment != 0) {
    throw InvalidArgument("a transfer of " + std::to_string(piece.buffer.size()) +
                          " bytes at byte " + std::to_string(piece.offset) + " of " + file.path +
                          ", memory address modulo " + std::to_string(file.alignment) + " is " +
                          std::to_string(address % file.alignment) +
                          ": all three must be multiples of " + std::to_string(file.alignment));
  }
}

IoTransfer TransferQueue::submit(IoOperation operation, std::span<const TransferPiece> pieces) {
  auto state = std::make_shared<Blocks>();
  std::vector<Block> blocks;
  for (const TransferPiece& piece : pieces) {
    check(piece);
    for (std::size_t done = 0; done < piece.buffer.size(); done += block_bytes_) {
      const std::size_t bytes = std::min(block_bytes_, piece.buffer.size() - done);
      blocks.push_back(
          {state, operation, piece.file, piece.offset + done, piece.buffer.subspan(done, bytes)});
    }
  }
  {
    const MutexLock lock(state->mutex);
    state->num_blocks = blocks.size();
  }
  {
    const MutexLock lock(mutex_);
    if (broken_) {
      failure_of(*broken_).raise();
    }
    std::move(blocks.begin(), blocks.end(), std::back_inserter(incoming_));
    if (driver_collects_) {
      engine_->wake();
    }
  }
  work_ready_.notify_one();
  return IoTransfer(std::move(state));
}

void TransferQueue::drive() noexcept {
  Driver driver;
  driver.slots.resize(engine_->queue_depth());
  for (std::size_t i = driver.slots.size(); i-- > 0;) {
    driver.free_slots.push_back(static_cast<std::uint32_t>(i));
  }
  try {
    while (take_incoming(driver)) {
      submit_blocks(driver);
      collect_blocks(driver);
    }
  } catch (const IoError& error) {
    fail_everything(driver, {error.error_number(), error.what()});
  } catch (const std::exception& error) {
    fail_everything(driver, {EIO, error.what()});
  }
}

IoFailure TransferQueue::failure_of(const Broken& broken) const {
  return {broken.error_number, files_.front().path, 0,
          "the I/O engine failed as a whole (" + broken.what + ") and moves nothing more to", ""};
}

/// Sleeps while there is nothing to do at all; false at the end.
bool TransferQueue::take_incoming(Driver& driver) {
  MutexLock lock(mutex_);
  driver_collects_ = false;
  if (driver.idle()) {
    work_ready_.wait(lock.native(),
                     [&]() CASTOR_REQUIRES(mutex_) { return !incoming_.empty() || stopping_; });
    if (incoming_.empty()) {
      return false;
    }
  }
  for (Block& block : incoming_) {
    driver.pending[kind_of(block.operation)].push_back(std::move(block));
  }
  incoming_.clear();
  // From here on whoever adds work ends the collect() that follows.
  driver_collects_ = true;
  return true;
}

void TransferQueue::submit_blocks(Driver& driver) {
  driver.requests.clear();
  while (!driver.free_slots.empty()) {
    const auto kind = driver.next_kind();
    if (!kind) {
      break;
    }
    Block block = std::move(driver.pending[*kind].front());
    driver.pending[*kind].pop_front();
    if (block.transfer->failed()) {
      block.transfer->end_block(std::nullopt);  // the rest of it is of no use to anybody
      continue;
    }
    const std::uint32_t slot = driver.free_slots.back();
    driver.free_slots.pop_back();
    driver.requests.push_back({block.operation, block.file, block.offset, block.buffer, slot});
    driver.slots[slot] = std::move(block);
    ++driver.num_in_flight[*kind];
  }
  if (!driver.requests.empty()) {
    engine_->submit(driver.requests);
  }
}

void TransferQueue::collect_blocks(Driver& driver) {
  if (driver.num_in_flight[0] + driver.num_in_flight[1] == 0) {
    return;
  }
  driver.completions.clear();
  engine_->collect(1, driver.completions);
  for (const IoCompletion& completion : driver.completions) {
    const auto slot = static_cast<std::uint32_t>(completion.tag);
    Block block = std::move(driver.slots[slot]);
    driver.free_slots.push_back(slot);
    --driver.num_in_flight[kind_of(block.operation)];
    finish(driver, std::move(block), completion);
  }
}

/// The one place that decides what a completion means.
void TransferQueue::finish(Driver& driver, Block block, const IoCompletion& completion) {
  const std::size_t bytes = block.buffer.size();
  const TransferFile& file = files_[block.file];
  const auto fail = [&](int error_number, const std::string& what, const std::string& remedy) {
    block.transfer->end_block(IoFailure{error_number, file.path, block.offset, what, remedy});
  };
  const int error_number = completion.error_number;
  if (error_number != 0 && error_number != EINTR && error_number != EAGAIN) {
    fail(error_number, what_failed(block.operation, bytes), remedy_for(error_number));
    return;
  }
  if (error_number == 0 && completion.transferred_bytes >= bytes) {
    block.transfer->end_block(std::nullopt);
    return;
  }
  if (error_number == 0 && completion.transferred_bytes == 0 &&
      block.operation == IoOperation::kRead) {
    fail(ENODATA, "the file ends early: " + what_failed(block.operation, bytes),
         "Something else shortened it");
    return;
  }
  const std::size_t progress =
      error_number != 0 ? 0 : completion.transferred_bytes / file.alignment * file.alignment;
  block.fruitless = progress > 0 ? 0 : block.fruitless + 1;
  {
    const MutexLock lock(mutex_);
    ++(error_number == 0 ? counts_.short_transfers : counts_.retries);
  }
  if (block.fruitless > kMaxFruitless) {
    fail(error_number != 0 ? error_number : EIO,
         "no progress after " + std::to_string(kMaxFruitless) +
             " attempts: " + what_failed(block.operation, bytes),
         remedy_for(EIO));
    return;
  }
  block.offset += progress;
  block.buffer = block.buffer.subspan(progress);
  driver.pending[kind_of(block.operation)].push_front(std::move(block));
}

void TransferQueue::fail_everything(Driver& driver, const Broken& broken) noexcept {
  // What the engine still has in flight ends in its destructor at the latest; as long as it
  // answers, it is waited for here, because buffers are free to go once their transfer has ended.
  try {
    while (engine_->in_flight() > 0) {
      engine_->collect(engine_->in_flight(), driver.completions);
    }
  } catch (...) {
    // The engine does not answer any more: nothing can be waited for.
  }
  std::vector<Block> incoming;
  {
    const MutexLock lock(mutex_);
    broken_ = broken;
    driver_collects_ = false;
    incoming.swap(incoming_);
  }
  const auto end = [&](const Block& block) {
    if (block.transfer) {
      block.transfer->end_block(failure_of(broken));
    }
  };
  std::for_each(driver.slots.begin(), driver.slots.end(), end);
  for (const auto& pending : driver.pending) {
    std::for_each(pending.begin(), pending.end(), end);
  }
  std::for_each(incoming.begin(), incoming.end(), end);
}

}  // namespace castor
