// What faults do to an engine. What the queue and the stream make of faults is in
// their own tests.

#include "io/fault_injection.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "io/test_support.h"

namespace castor {
namespace {

using test::noise;

constexpr std::size_t kBlock = 2 * kIoAlignment;

TEST(IoFaultsTest, AreParsed) {
  const auto faults = parse_io_faults("write:17:EIO,read:5+:short,any:1:flip");
  ASSERT_EQ(faults.size(), 3U);
  EXPECT_EQ(faults[0].kind, IoFault::Kind::kErrno);
  EXPECT_EQ(faults[0].value, static_cast<std::uint64_t>(EIO));
  EXPECT_EQ(faults[0].first, 16U);
  EXPECT_EQ(faults[0].count, 1U);
  EXPECT_EQ(faults[0].operation, IoOperation::kWrite);
  EXPECT_EQ(faults[1].kind, IoFault::Kind::kShort);
  EXPECT_EQ(faults[1].first, 4U);
  EXPECT_EQ(faults[1].count, IoFault::kForever);
  EXPECT_EQ(faults[1].operation, IoOperation::kRead);
  EXPECT_EQ(faults[2].kind, IoFault::Kind::kBitFlip);
  EXPECT_FALSE(faults[2].operation.has_value());
  EXPECT_TRUE(parse_io_faults("count").empty());
}

TEST(IoFaultsTest, WhatIsNotUnderstoodIsQuoted) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "'', and it has not three parts"},
      {"write", "'write', and it has not three parts"},
      {"write:1", "'write:1', and it has not three parts"},
      {"write:1:EIO,", "'', and it has not three parts"},
      {"erase:1:EIO", "'erase:1:EIO', and its operation is not read, write or any"},
      {"read:0:EIO", "'read:0:EIO', and its N is not a number from 1 on"},
      {"read:-1:EIO", "its N is not a number"},
      {"read:1x:EIO", "its N is not a number"},
      {"read::EIO", "its N is not a number"},
      {"read:99999999999999999999:EIO", "its N is not a number"},
      {"read:1:EWHAT", "its FAULT is not short, flip or one of EIO, ENOSPC"},
      {"read:1:EIO:2", "its FAULT is not"},
      {"read:1: EIO", "its FAULT is not"},
      {"count,read:1:EIO", "'count', and it has not three parts"},
  };
  for (const auto& [text, expected] : cases) {
    try {
      (void)parse_io_faults(text);
      ADD_FAILURE() << "'" << text << "' was taken";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
}

class FaultyIoEngineTest : public test::PlaceTest {
 protected:
  void SetUp() override {
    PlaceTest::SetUp();
    if (directory_) {
      file_ = std::make_unique<DirectFile>(test::make_file(*directory_ / "file", 8 * kBlock));
    }
  }

  /// One transfer of a block, alone in the engine.
  IoCompletion transfer(IoEngine& engine, IoOperation operation, std::span<std::byte> buffer) {
    const IoRequest request{operation, 0, 0, buffer, 77};
    engine.submit({&request, 1});
    std::vector<IoCompletion> completions;
    while (engine.in_flight() > 0) {
      engine.collect(1, completions);
    }
    EXPECT_EQ(completions.size(), 1U);
    EXPECT_EQ(completions.at(0).tag, 77U);
    EXPECT_EQ(completions.at(0).expected_bytes, buffer.size());
    return completions.at(0);
  }

  [[nodiscard]] std::unique_ptr<FaultyIoEngine> faulty(const std::string& faults) const {
    return std::make_unique<FaultyIoEngine>(make_engine(*file_, 4), parse_io_faults(faults));
  }

  std::unique_ptr<DirectFile> file_;
};

TEST_P(FaultyIoEngineTest, TheNthOperationOfAKindFailsOnce) {
  const auto engine = faulty("write:2:ENOSPC,read:3:EIO,any:6:EINTR");
  const auto memory = noise(kBlock, 1);
  const auto error_of = [&](IoOperation operation) {
    return transfer(*engine, operation, memory.span()).error_number;
  };
  EXPECT_EQ(error_of(IoOperation::kWrite), 0);
  EXPECT_EQ(error_of(IoOperation::kRead), 0);
  EXPECT_EQ(error_of(IoOperation::kWrite), ENOSPC);
  EXPECT_EQ(error_of(IoOperation::kRead), 0);
  EXPECT_EQ(error_of(IoOperation::kRead), EIO);
  EXPECT_EQ(error_of(IoOperation::kRead), EINTR);  // the sixth of all
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(error_of(IoOperation::kWrite), 0);
    EXPECT_EQ(error_of(IoOperation::kRead), 0);
  }
  EXPECT_TRUE(engine->description().ends_with(
      ", FAULTS INJECTED (write:2:ENOSPC,read:3:EIO,any:6:EINTR; so far 14 reads, 12 writes, "
      "3 faults)"))
      << engine->description();
}

TEST_P(FaultyIoEngineTest, ADeviceMayVanishForGood) {
  const auto engine = faulty("any:3+:ENODEV");
  const auto memory = noise(kBlock, 1);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(transfer(*engine, IoOperation::kRead, memory.span()).error_number,
              i < 2 ? 0 : ENODEV);
  }
}

TEST_P(FaultyIoEngineTest, AShortTransferLacksItsEndAndAFlippedOneABit) {
  const auto written = noise(kBlock, 1);
  const auto read = noise(kBlock, 2);
  {
    const auto engine = faulty("write:1:flip,read:2:short,read:3:flip");
    EXPECT_TRUE(transfer(*engine, IoOperation::kWrite, written.span()).complete());
    EXPECT_TRUE(transfer(*engine, IoOperation::kRead, read.span()).complete());
    EXPECT_EQ(written.data()[0] ^ read.data()[0], std::byte{0x10}) << "the write flipped a bit";
    read.data()[0] ^= std::byte{0x10};
    EXPECT_TRUE(test::equal(written.span(), read.span()));

    test::fill(read.span(), 3);
    const auto untouched = noise(kBlock, 3);
    const IoCompletion completion = transfer(*engine, IoOperation::kRead, read.span());
    EXPECT_EQ(completion.error_number, 0);
    EXPECT_EQ(completion.transferred_bytes, kBlock - kIoAlignment);
    EXPECT_TRUE(test::equal(untouched.span().subspan(kBlock - kIoAlignment),
                            read.span().subspan(kBlock - kIoAlignment)));

    EXPECT_TRUE(transfer(*engine, IoOperation::kRead, read.span()).complete());
    EXPECT_TRUE(test::equal(written.span(), read.span())) << "flipped on both ways";
  }
}

TEST_P(FaultyIoEngineTest, CountsOfAllEnginesAreAdded) {
  const auto memory = noise(kBlock, 1);
  IoFaultTally total;
  for (int i = 0; i < 2; ++i) {
    const auto engine = std::make_unique<FaultyIoEngine>(
        make_engine(*file_, 4), std::vector<IoFault>{}, FaultyIoEngine::Options{.total = &total});
    EXPECT_TRUE(transfer(*engine, IoOperation::kWrite, memory.span()).complete());
    EXPECT_TRUE(transfer(*engine, IoOperation::kRead, memory.span()).complete());
    EXPECT_TRUE(transfer(*engine, IoOperation::kRead, memory.span()).complete());
    EXPECT_TRUE(engine->description().ends_with(
        ", operations counted (so far 2 reads, 1 writes, 0 faults)"))
        << engine->description();
  }
  EXPECT_EQ(total.counts().reads, 4U);
  EXPECT_EQ(total.counts().writes, 2U);
  EXPECT_EQ(total.counts().faults, 0U);
}

TEST_P(FaultyIoEngineTest, MoreThanItsDepthIsRefusedAndCountedNowhere) {
  FaultyIoEngine engine(make_engine(*file_, 2), {{IoFault::Kind::kErrno, EIO, 0}});
  const auto memory = noise(3 * kBlock, 1);
  std::vector<IoRequest> requests;
  for (std::size_t i = 0; i < 3; ++i) {
    requests.push_back({IoOperation::kRead, 0, 0, memory.span().subspan(i * kBlock, kBlock), i});
  }
  EXPECT_THROW(engine.submit(requests), InvalidArgument);
  EXPECT_EQ(engine.in_flight(), 0U);
  requests.pop_back();
  requests.back().file = 9;
  EXPECT_THROW(engine.submit(requests), InvalidArgument);
  EXPECT_EQ(engine.in_flight(), 0U);
  EXPECT_EQ(engine.counts().reads, 0U);
  EXPECT_EQ(transfer(engine, IoOperation::kRead, memory.span().first(kBlock)).error_number, EIO);
}

INSTANTIATE_TEST_SUITE_P(Every, FaultyIoEngineTest, ::testing::ValuesIn(test::every_place()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace castor
