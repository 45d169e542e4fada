// One suite for every engine on every kind of file system.

#include "core/io_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>
#include <thread>

#include "core/error.h"
#include "core/units.h"
#include "io/test_support.h"

namespace castor {
namespace {

using test::every_place;
using test::make_file;
using test::noise;

std::vector<IoCompletion> run(IoEngine& engine, std::span<const IoRequest> requests) {
  engine.submit(requests);
  std::vector<IoCompletion> completions;
  while (engine.in_flight() > 0) {
    engine.collect(engine.in_flight(), completions);
  }
  return completions;
}

IoCompletion run(IoEngine& engine, const IoRequest& request) {
  const auto completions = run(engine, {&request, 1});
  EXPECT_EQ(completions.size(), 1U);
  return completions.empty() ? IoCompletion{} : completions.front();
}

class IoEngineTest : public test::PlaceTest {};

TEST_P(IoEngineTest, ReadsBackWhatItWroteInOneBatchOutOfOrder) {
  constexpr std::size_t kBlock = 64 * kKiB;
  constexpr std::size_t kCount = 32;
  const DirectFile file = make_file(*directory_ / "file", kBlock * kCount);
  for (const bool registered : {false, true}) {
    auto written = noise(kBlock * kCount, 1 + (registered ? 1 : 0));
    AlignedBuffer read(kBlock * kCount, kIoAlignment);
    std::vector<std::span<std::byte>> buffers;
    if (registered) {
      buffers = {written.span(), read.span()};
    }
    const auto engine = make_engine(file, kCount, buffers);
    for (const IoOperation operation : {IoOperation::kWrite, IoOperation::kRead}) {
      const auto& memory = operation == IoOperation::kWrite ? written : read;
      std::vector<IoRequest> requests;
      for (std::size_t i = 0; i < kCount; ++i) {
        const std::size_t block = i * 7 % kCount;
        requests.push_back({operation, 0, block * kBlock,
                            memory.span().subspan(block * kBlock, kBlock), 1000 + block});
      }
      const auto completions = run(*engine, requests);
      std::set<std::uint64_t> tags;
      for (const IoCompletion& completion : completions) {
        EXPECT_TRUE(completion.complete()) << completion.error_number;
        EXPECT_EQ(completion.expected_bytes, kBlock);
        tags.insert(completion.tag);
      }
      EXPECT_EQ(tags.size(), kCount);
      EXPECT_EQ(*tags.begin(), 1000U);
      EXPECT_EQ(*tags.rbegin(), 1000U + kCount - 1);
    }
    EXPECT_TRUE(test::equal(written.span(), read.span()));
  }
}

TEST_P(IoEngineTest, TheEndOfTheFileIsAShortTransfer) {
  const DirectFile file = make_file(*directory_ / "file", 3 * 4096);
  auto memory = noise(2 * 4096, 1);
  const auto engine = make_engine(file, 4);
  const auto across = run(*engine, {IoOperation::kRead, 0, 2 * 4096, memory.span(), 1});
  EXPECT_EQ(across.error_number, 0);
  EXPECT_EQ(across.transferred_bytes, 4096U);
  EXPECT_FALSE(across.complete());
  const auto beyond = run(*engine, {IoOperation::kRead, 0, 3 * 4096, memory.span(), 2});
  EXPECT_EQ(beyond.error_number, 0);
  EXPECT_EQ(beyond.transferred_bytes, 0U);
  EXPECT_FALSE(beyond.complete());
}

TEST_P(IoEngineTest, AFailedTransferIsAValueWithItsErrno) {
  test::write_file(*directory_ / "file", std::string(8192, 'x'));
  const DirectFile file(*directory_ / "file", FileAccess::kRead);
  auto memory = noise(4096, 1);
  const auto engine = make_engine(file, 4);
  const auto completion = run(*engine, {IoOperation::kWrite, 0, 0, memory.span(), 77});
  EXPECT_EQ(completion.error_number, EBADF);  // opened for reading
  EXPECT_EQ(completion.tag, 77U);
  EXPECT_FALSE(completion.complete());
  EXPECT_EQ(test::read_file(*directory_ / "file"), std::string(8192, 'x'));
}

TEST_P(IoEngineTest, MoreThanTheDepthIsRefusedAsAWhole) {
  const DirectFile file = make_file(*directory_ / "file", 8 * 4096);
  auto memory = noise(8 * 4096, 1);
  const auto engine = make_engine(file, 2);
  std::vector<IoRequest> requests;
  for (std::uint64_t i = 0; i < 3; ++i) {
    requests.push_back({IoOperation::kRead, 0, i * 4096, memory.span().subspan(i * 4096, 4096), i});
  }
  EXPECT_THROW(engine->submit(requests), InvalidArgument);
  EXPECT_EQ(engine->in_flight(), 0U);
  requests.pop_back();
  EXPECT_EQ(run(*engine, requests).size(), 2U);
}

TEST_P(IoEngineTest, UnknownFilesEmptyBuffersAndDepthZeroAreRefused) {
  const DirectFile file = make_file(*directory_ / "file", 4096);
  auto memory = noise(4096, 1);
  const auto engine = make_engine(file, 2);
  const IoRequest unknown{IoOperation::kRead, 1, 0, memory.span(), 0};
  const IoRequest empty{IoOperation::kRead, 0, 0, {}, 0};
  EXPECT_THROW(engine->submit({&unknown, 1}), InvalidArgument);
  EXPECT_THROW(engine->submit({&empty, 1}), InvalidArgument);
  engine->submit({});
  EXPECT_EQ(engine->in_flight(), 0U);
  EXPECT_THROW((void)make_engine(file, 0), InvalidArgument);
}

TEST_P(IoEngineTest, CollectWithNothingInFlightReturnsAtOnce) {
  const DirectFile file = make_file(*directory_ / "file", 4096);
  const auto engine = make_engine(file, 2);
  std::vector<IoCompletion> completions;
  engine->collect(5, completions);
  EXPECT_TRUE(completions.empty());
}

TEST_P(IoEngineTest, DestructionWaitsForWhatIsInFlight) {
  const DirectFile file = make_file(*directory_ / "file", 4 * kMiB);
  auto written = noise(4 * kMiB, 3);
  {
    const auto engine = make_engine(file, 16);
    std::vector<IoRequest> requests;
    for (std::uint64_t i = 0; i < 16; ++i) {
      requests.push_back({IoOperation::kWrite, 0, i * 256 * kKiB,
                          written.span().subspan(i * 256 * kKiB, 256 * kKiB), i});
    }
    engine->submit(requests);
  }
  AlignedBuffer read(4 * kMiB, kIoAlignment);
  const auto engine = make_engine(file, 1);
  EXPECT_TRUE(run(*engine, {IoOperation::kRead, 0, 0, read.span(), 0}).complete());
  EXPECT_TRUE(test::equal(written.span(), read.span()));
}

// A pipe cannot be used here (transfers are positioned), so that what waits is a large transfer:
// wake() may come before, during or after it, and the completion must not get lost.
TEST_P(IoEngineTest, WakesNeverLoseACompletion) {
  const DirectFile file = make_file(*directory_ / "file", 64 * 4096);
  auto memory = noise(64 * 4096, 1);
  const auto engine = make_engine(file, 8);
  std::atomic<bool> done{false};
  std::jthread waker([&] {
    while (!done) {
      engine->wake();
      std::this_thread::yield();
    }
  });
  // A transfer's memory is its own until it is complete.
  std::vector<std::uint64_t> free = {0, 1, 2, 3, 4, 5, 6, 7};
  std::size_t num_submitted = 0;
  std::size_t num_completions = 0;
  std::vector<IoCompletion> completions;
  while (num_completions < 500) {
    if (num_submitted < 500 && !free.empty()) {
      const std::uint64_t piece = free.back();
      free.pop_back();
      const IoRequest request{IoOperation::kRead, 0, num_submitted++ % 64 * 4096,
                              memory.span().subspan(piece * 4096, 4096), piece};
      engine->submit({&request, 1});
      continue;
    }
    completions.clear();
    engine->collect(1, completions);  // may be woken with nothing
    for (const IoCompletion& completion : completions) {
      free.push_back(completion.tag);
      ++num_completions;
    }
  }
  done = true;
  EXPECT_EQ(num_submitted, 500U);
  EXPECT_EQ(engine->in_flight(), 0U);
}

TEST_P(IoEngineTest, ItsDescriptionSaysWhatItIs) {
  const DirectFile file = make_file(*directory_ / "file", 4096);
  const std::string text = make_engine(file, 2)->description();
  const bool is_uring = GetParam().engine == IoEngineKind::kIoUring;
  EXPECT_EQ(text.starts_with("io_uring"), is_uring) << text;
  EXPECT_EQ(text.starts_with("pread and pwrite in 2 threads"), !is_uring) << text;
}

INSTANTIATE_TEST_SUITE_P(Every, IoEngineTest, ::testing::ValuesIn(every_place()),
                         [](const auto& instance) { return instance.param.name; });

TEST(IoEnginesTest, AutoTakesIoUringWhereItWorksAndElseSaysWhyNot) {
  const test::TempDirectory directory;
  const DirectFile file = make_file(directory / "file", 4096);
  const auto engine = make_io_engine(IoEngineKind::kAuto, {{file.descriptor(), file.path()}}, 4);
  const std::string reason = why_no_io_uring();
  if (reason.empty()) {
    EXPECT_TRUE(engine->description().starts_with("io_uring of depth 4")) << engine->description();
  } else {
    EXPECT_NE(engine->description().find("not io_uring: " + reason), std::string::npos);
  }
}

TEST(IoEnginesTest, NamesAreParsed) {
  EXPECT_EQ(parse_io_engine_kind("auto"), IoEngineKind::kAuto);
  EXPECT_EQ(parse_io_engine_kind("io_uring"), IoEngineKind::kIoUring);
  EXPECT_EQ(parse_io_engine_kind("threads"), IoEngineKind::kThreads);
  EXPECT_THROW((void)parse_io_engine_kind("libaio"), InvalidArgument);
}

TEST(DirectFileTest, TmpfsIsBufferedAndSaysSo) {
  if (!std::filesystem::is_directory("/dev/shm")) {
    GTEST_SKIP() << "no /dev/shm";
  }
  const test::TempDirectory directory("/dev/shm");
  const DirectFile file = make_file(directory / "file", 4096);
  EXPECT_FALSE(file.direct());
  EXPECT_EQ(file.description(), file.path() + " (buffered: tmpfs is host memory, not a device)");
  EXPECT_EQ(file.bytes(), 4096U);
}

TEST(DirectFileTest, WhatIsNoRegularFileIsRefused) {
  EXPECT_THROW(DirectFile("/dev/null", FileAccess::kReadWrite), IoError);
  try {
    const DirectFile file("/nowhere/at/all", FileAccess::kRead);
    FAIL() << "opened";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENOENT);
    EXPECT_EQ(error.path(), "/nowhere/at/all");
  }
}

}  // namespace
}  // namespace castor
