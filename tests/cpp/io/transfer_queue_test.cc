// Transfers over every engine, with an adversary between the two.

#include "io/transfer_queue.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "core/error.h"
#include "core/units.h"
#include "io/fault_injection.h"
#include "io/test_support.h"

namespace castor {
namespace {

using test::noise;

constexpr std::size_t kBlock = 64 * kKiB;
constexpr std::size_t kBytes = 20 * kBlock + 3 * 4096;  // the last block is a part of one

class TransferQueueTest : public test::PlaceTest {
 protected:
  void SetUp() override {
    PlaceTest::SetUp();
    if (directory_) {
      file_ = std::make_unique<DirectFile>(test::make_file(*directory_ / "file", kBytes));
    }
  }

  [[nodiscard]] std::unique_ptr<TransferQueue> make_queue(std::vector<IoFault> faults = {},
                                                          std::uint64_t shuffle_seed = 0,
                                                          std::size_t depth = 8) const {
    return std::make_unique<TransferQueue>(
        std::make_unique<FaultyIoEngine>(make_engine(*file_, depth), std::move(faults),
                                         FaultyIoEngine::Options{.shuffle_seed = shuffle_seed}),
        std::vector<TransferFile>{{file_->path(), file_->alignment()}}, kBlock);
  }

  static void run(TransferQueue& queue, IoOperation operation, std::span<std::byte> memory,
                  std::uint64_t offset = 0) {
    const TransferPiece piece{0, offset, memory};
    queue.submit(operation, {&piece, 1}).wait();
  }

  /// Writes and reads back through queues with the faults.
  void expect_round_trip(const std::vector<IoFault>& faults, std::uint64_t shuffle_seed = 0) {
    const auto written = noise(kBytes, 1);
    const auto read = noise(kBytes, 2);
    run(*make_queue(faults, shuffle_seed), IoOperation::kWrite, written.span());
    run(*make_queue(), IoOperation::kRead, read.span());
    EXPECT_TRUE(test::equal(written.span(), read.span())) << "a write went wrong";
    test::fill(read.span(), 3);
    run(*make_queue(faults, shuffle_seed), IoOperation::kRead, read.span());
    EXPECT_TRUE(test::equal(written.span(), read.span())) << "a read went wrong";
  }

  std::unique_ptr<DirectFile> file_;
};

TEST_P(TransferQueueTest, MovesSizesAndOffsetsOfEveryKind) {
  const auto queue = make_queue();
  std::uint64_t seed = 1;
  for (const std::size_t bytes :
       {std::size_t{4096}, kBlock - 4096, kBlock, kBlock + 4096, 5 * kBlock, kBytes - 4096}) {
    for (const std::uint64_t offset : {0, 4096}) {
      const auto written = noise(bytes, ++seed);
      const auto read = noise(bytes, ++seed);
      run(*queue, IoOperation::kWrite, written.span(), offset);
      run(*queue, IoOperation::kRead, read.span(), offset);
      EXPECT_TRUE(test::equal(written.span(), read.span())) << bytes << " at " << offset;
    }
  }
  queue->submit(IoOperation::kRead, {}).wait();  // nothing at all
}

TEST_P(TransferQueueTest, PiecesGoWhereTheyBelong) {
  const auto queue = make_queue();
  const auto written = noise(4 * 4096, 1);
  std::vector<TransferPiece> pieces;
  for (const std::size_t i : {3, 0, 2, 1}) {
    pieces.push_back({0, i * 2 * 4096, written.span().subspan(i * 4096, 4096)});
  }
  queue->submit(IoOperation::kWrite, pieces).wait();
  for (std::size_t i = 0; i < 4; ++i) {
    const auto read = noise(4096, 2);
    run(*queue, IoOperation::kRead, read.span(), i * 2 * 4096);
    EXPECT_TRUE(test::equal(written.span().subspan(i * 4096, 4096), read.span()));
  }
}

TEST_P(TransferQueueTest, ShortTransfersGoOnWhereTheyStopped) {
  // Whole blocks short, an odd number of bytes short, nothing at all done by a write.
  for (const std::uint64_t missing : {4096, 8192, 1, 4095, 12345}) {
    for (const std::uint64_t first : {0, 1, 7, 20}) {
      expect_round_trip({{IoFault::Kind::kShort, missing, first}});
    }
  }
  expect_round_trip({{IoFault::Kind::kShort, 4096, 0, 40}});  // one after another
}

TEST_P(TransferQueueTest, InterruptionsAreTriedAgain) {
  for (const int error_number : {EINTR, EAGAIN}) {
    const auto value = static_cast<std::uint64_t>(error_number);
    expect_round_trip({{IoFault::Kind::kErrno, value, 3, 1}});
    expect_round_trip({{IoFault::Kind::kErrno, value, 0, 40}});
  }
}

TEST_P(TransferQueueTest, OrderAndDelayChangeNothing) {
  for (std::uint64_t seed = 1; seed < 6; ++seed) {
    expect_round_trip({{IoFault::Kind::kDelay, 5, 2, 3}, {IoFault::Kind::kDelay, 100, 20}}, seed);
  }
}

TEST_P(TransferQueueTest, RetriesAreCounted) {
  const auto written = noise(kBytes, 1);
  const auto queue =
      make_queue({{IoFault::Kind::kErrno, EINTR, 0, 3}, {IoFault::Kind::kShort, 4096, 10, 2}});
  run(*queue, IoOperation::kWrite, written.span());
  EXPECT_EQ(queue->counts().retries, 3U);
  EXPECT_EQ(queue->counts().short_transfers, 2U);
}

TEST_P(TransferQueueTest, AnErrorAtEveryOperationNamesPathOffsetAndErrno) {
  const auto memory = noise(kBytes, 1);
  for (const int error_number : {EIO, ENOSPC, ENODEV}) {
    for (std::uint64_t n = 0; n < 21; ++n) {
      for (const IoOperation operation : {IoOperation::kWrite, IoOperation::kRead}) {
        // Depth 1: the n-th operation is the n-th block.
        const auto queue = make_queue(
            {{IoFault::Kind::kErrno, static_cast<std::uint64_t>(error_number), n}}, 0, 1);
        try {
          run(*queue, operation, memory.span());
          FAIL() << "error " << error_number << " of operation " << n << " was lost";
        } catch (const IoError& error) {
          EXPECT_EQ(error.error_number(), error_number);
          EXPECT_EQ(error.path(), file_->path());
          EXPECT_EQ(error.offset(), n * kBlock);
        }
        run(*queue, operation, memory.span());  // the queue serves on
      }
    }
  }
}

TEST_P(TransferQueueTest, OnlyTheTransferThatFailedIsToldSo) {
  const auto queue = make_queue({{IoFault::Kind::kErrno, EIO, 1}}, 0, 1);
  const auto memory = noise(4 * kBlock, 1);
  std::vector<IoTransfer> transfers;
  for (std::size_t i = 0; i < 4; ++i) {
    const TransferPiece piece{0, i * kBlock, memory.span().subspan(i * kBlock, kBlock)};
    transfers.push_back(queue->submit(IoOperation::kWrite, {&piece, 1}));
  }
  for (std::size_t i = 0; i < 4; ++i) {
    if (i == 1) {
      EXPECT_THROW(transfers[i].wait(), IoError);
    } else {
      EXPECT_NO_THROW(transfers[i].wait());
    }
  }
}

TEST_P(TransferQueueTest, TheEndOfTheFileIsAnErrorAndNeverSilent) {
  const auto queue = make_queue();
  const auto memory = noise(4 * 4096, 1);
  try {
    run(*queue, IoOperation::kRead, memory.span(), kBytes - 4096);
    FAIL() << "read beyond the end";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENODATA);
    EXPECT_EQ(error.offset(), kBytes);
    EXPECT_NE(std::string(error.what()).find("the file ends early: cannot read 12.00 KiB"),
              std::string::npos)
        << error.what();
  }
}

TEST_P(TransferQueueTest, NoProgressIsAnErrorAfterManyAttempts) {
  const auto memory = noise(4096, 1);
  for (const IoFault fault : {IoFault{IoFault::Kind::kErrno, EAGAIN, 0, 100'000},
                              IoFault{IoFault::Kind::kShort, 4096, 0, 100'000}}) {
    const auto queue = make_queue({fault});
    try {
      run(*queue, IoOperation::kWrite, memory.span());
      FAIL() << "an operation that never got on has ended well";
    } catch (const IoError& error) {
      EXPECT_EQ(error.error_number(), fault.kind == IoFault::Kind::kErrno ? EAGAIN : EIO);
    }
  }
}

TEST_P(TransferQueueTest, MisalignedTransfersAreRefusedWithTheNumbers) {
  const auto queue = make_queue();
  const auto memory = noise(3 * 4096, 1);
  for (const TransferPiece& piece :
       {TransferPiece{0, 1, memory.span().first(4096)},
        TransferPiece{0, 0, memory.span().first(100)},
        TransferPiece{0, 0, memory.span().subspan(1, 4096)}, TransferPiece{1, 0, memory.span()}}) {
    EXPECT_THROW((void)queue->submit(IoOperation::kWrite, {&piece, 1}), InvalidArgument);
  }
}

TEST_P(TransferQueueTest, ATransferThatIsDroppedIsWaitedFor) {
  const auto queue = make_queue();
  const auto written = noise(kBytes, 5);
  {
    const TransferPiece piece{0, 0, written.span()};
    const IoTransfer dropped = queue->submit(IoOperation::kWrite, {&piece, 1});
  }
  const auto read = noise(kBytes, 6);
  run(*queue, IoOperation::kRead, read.span());
  EXPECT_TRUE(test::equal(written.span(), read.span()));
}

TEST_P(TransferQueueTest, ServesReadersAndWritersAtOnce) {
  constexpr std::size_t kThreads = 6;
  constexpr std::size_t kSlice = 3 * 4096;
  const auto queue = make_queue(
      {{IoFault::Kind::kShort, 4096, 50, 10}, {IoFault::Kind::kErrno, EINTR, 100, 10}}, 7);
  std::atomic<int> num_wrong{0};
  {
    std::vector<std::jthread> threads;
    for (std::size_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const auto written = noise(kSlice, thread);
        const auto read = noise(kSlice, thread);
        for (std::uint64_t round = 0; round < 30; ++round) {
          test::fill(written.span(), 1000 * thread + round);
          run(*queue, IoOperation::kWrite, written.span(), thread * kSlice);
          run(*queue, IoOperation::kRead, read.span(), thread * kSlice);
          num_wrong += test::equal(written.span(), read.span()) ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(TransferQueueTest, BlocksThatAreNoMultipleOfTheAlignmentAreRefused) {
  EXPECT_THROW(TransferQueue(make_engine(*file_, 1), {{file_->path(), 4096}}, 5000),
               InvalidArgument);
  EXPECT_THROW(TransferQueue(make_engine(*file_, 1), {{file_->path(), 4096}}, 0), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Every, TransferQueueTest, ::testing::ValuesIn(test::every_place()),
                         [](const auto& instance) { return instance.param.name; });

/// An engine that dies as a whole, as a ring does when the kernel refuses to take more.
class DyingEngine final : public IoEngine {
 public:
  void submit(std::span<const IoRequest>) override { throw IoError(EBADF, "ring", 0, "died:"); }
  void collect(std::size_t, std::vector<IoCompletion>&) override {}
  void wake() noexcept override {}
  [[nodiscard]] std::size_t queue_depth() const noexcept override { return 4; }
  [[nodiscard]] std::size_t in_flight() const noexcept override { return 0; }
  [[nodiscard]] std::string description() const override { return "dying"; }
};

TEST(TransferQueueFailureTest, AnEngineThatFailsAsAWholeFailsEveryTransfer) {
  TransferQueue queue(std::make_unique<DyingEngine>(), {{"nowhere", 4096}}, kBlock);
  const auto memory = noise(10 * kBlock, 1);
  const TransferPiece piece{0, 0, memory.span()};
  EXPECT_THROW(queue.submit(IoOperation::kRead, {&piece, 1}).wait(), IoError);
  EXPECT_THROW((void)queue.submit(IoOperation::kRead, {&piece, 1}), IoError);
}

}  // namespace
}  // namespace castor
