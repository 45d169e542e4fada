#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/io_engine.h"
#include "core/mutex.h"

namespace castor {

struct IoFailure;

/// A contiguous piece of a transfer: one range of one file.
struct TransferPiece {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::span<std::byte> buffer;
};

/// A transfer in flight. Its destructor waits, so that no transfer outlives the scope that keeps
/// its buffers. Move-only; an empty transfer has nothing to wait for.
class IoTransfer {
 public:
  /// The work under way. Seam: blocks of a TransferQueue, messages of other ranks (PayloadSource).
  class State {
   public:
    virtual ~State() = default;
    /// Waits until all bytes are there; throws the failure. Called once, or not at all.
    virtual void wait() = 0;
    /// Waits until nothing touches the buffers any more.
    virtual void drain() noexcept = 0;
  };

  IoTransfer() = default;
  explicit IoTransfer(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}
  IoTransfer(IoTransfer&&) noexcept = default;
  IoTransfer& operator=(IoTransfer&& other) noexcept;
  IoTransfer(const IoTransfer&) = delete;
  IoTransfer& operator=(const IoTransfer&) = delete;
  ~IoTransfer() { drain(); }

  /// Waits until all bytes are transferred. Throws IoError for the first failure, or what its
  /// source throws; nothing of the transfer is in flight then either. A second call returns at
  /// once.
  void wait();
  [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }

 private:
  void drain() noexcept;

  std::shared_ptr<State> state_;
};

/// A file that a queue transfers to: its path for messages, and where a short transfer may
/// continue.
struct TransferFile {
  std::string path;
  std::size_t alignment = 1;  ///< bytes; a short transfer goes on from a multiple of this
};

/// Complete transfers over an engine: cuts them into blocks, keeps as many in flight as the engine
/// takes, and looks at every completion. Short transfers go on where they stopped; EINTR and EAGAIN
/// are tried again. The end of the file, any other errno, and kMaxFruitless attempts in a row
/// without progress are an IoError. Where reads and writes are both waiting, each gets half of the
/// depth.
///
/// One thread of its own drives the engine, so that transfers go on while their owners compute.
/// Thread-safe. Owns the engine; the files and all buffers outlive it. Destruction waits for
/// everything submitted.
class TransferQueue {
 public:
  static constexpr std::size_t kMaxFruitless = 100;

  /// Starts the thread. There is at least one file. `block_bytes` is a multiple of every file's
  /// alignment (else InvalidArgument).
  TransferQueue(std::unique_ptr<IoEngine> engine, std::vector<TransferFile> files,
                std::size_t block_bytes);
  ~TransferQueue();
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  /// Starts a transfer of these pieces. Throws InvalidArgument for a buffer, size or offset that is
  /// no multiple of the file's alignment; IoError when the engine has failed as a whole. A write
  /// does not change its buffers.
  [[nodiscard]] IoTransfer submit(IoOperation operation, std::span<const TransferPiece> pieces);

  [[nodiscard]] std::size_t block_bytes() const noexcept { return block_bytes_; }
  [[nodiscard]] const std::string& path(std::uint32_t file) const { return files_[file].path; }
  [[nodiscard]] std::string description() const;

  /// Number of transfers that were continued or tried again since the start.
  struct Counts {
    std::uint64_t short_transfers = 0;
    std::uint64_t retries = 0;
  };
  [[nodiscard]] Counts counts() const;

 private:
  struct Blocks;
  struct Block;
  struct Driver;  // state that only the driving thread touches
  /// Reason why the engine failed as a whole.
  struct Broken {
    int error_number = 0;
    std::string what;
  };

  void check(const TransferPiece& piece) const;
  void drive() noexcept;
  bool take_incoming(Driver& driver);
  void submit_blocks(Driver& driver);
  void collect_blocks(Driver& driver);
  void finish(Driver& driver, Block block, const IoCompletion& completion);
  void fail_everything(Driver& driver, const Broken& broken) noexcept;
  [[nodiscard]] IoFailure failure_of(const Broken& broken) const;

  const std::unique_ptr<IoEngine> engine_;
  const std::vector<TransferFile> files_;
  const std::size_t block_bytes_;

  // Never held together with the mutex of a IoTransfer::State.
  mutable Mutex mutex_;
  std::condition_variable work_ready_;
  std::vector<Block> incoming_ CASTOR_GUARDED_BY(mutex_);
  // The driving thread is in collect(), and may have to be woken.
  bool driver_collects_ CASTOR_GUARDED_BY(mutex_) = false;
  bool stopping_ CASTOR_GUARDED_BY(mutex_) = false;
  std::optional<Broken> broken_ CASTOR_GUARDED_BY(mutex_);
  Counts counts_ CASTOR_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace castor
