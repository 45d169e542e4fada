#include "io/io_measure.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/units.h"
#include "io/test_support.h"

namespace castor {
namespace {

class IoMeasureTest : public test::PlaceTest {};

// Whatever the machine was busy with: the first transfer may take longer than the time given.
TEST_P(IoMeasureTest, AMixedOneReadsAndWritesHoweverShortItIs) {
  const DirectFile file = test::make_file(*directory_ / "file", kMiB);
  const IoWorkload workload{
      .mix = IoMix::kMixed, .block_bytes = 64 * kKiB, .depth = 1, .bytes = kMiB, .seconds = 1e-9};
  const IoMeasurement found = measure_io(GetParam().engine, file, workload);
  EXPECT_EQ(found.read_bytes, 64 * kKiB);
  EXPECT_EQ(found.written_bytes, 64 * kKiB);
}

TEST_P(IoMeasureTest, EveryMixMovesWholeBlocksOfTheRightKind) {
  const DirectFile file = test::make_file(*directory_ / "file", kMiB);
  for (const IoMix mix : {IoMix::kRead, IoMix::kWrite, IoMix::kMixed}) {
    const IoWorkload workload{.mix = mix,
                              .block_bytes = 64 * kKiB,
                              .depth = 4,
                              .begin = 4096,
                              .bytes = kMiB - 4096,
                              .seconds = 0.02};
    const IoMeasurement found = measure_io(GetParam().engine, file, workload);
    EXPECT_GT(found.seconds, 0.0);
    EXPECT_EQ(found.read_bytes % (64 * kKiB), 0U);
    EXPECT_EQ(found.written_bytes % (64 * kKiB), 0U);
    EXPECT_EQ(found.read_bytes > 0, mix != IoMix::kWrite);
    EXPECT_EQ(found.written_bytes > 0, mix != IoMix::kRead);
    EXPECT_EQ(file.bytes(), kMiB);
  }
}

TEST_P(IoMeasureTest, FillingWritesTheWholeRangeAndNoMore) {
  const std::string path = *directory_ / "file";
  const DirectFile file = test::make_file(path, 40 * kMiB + 3 * 4096);
  fill_range(GetParam().engine, file, 4096, 40 * kMiB + 4096);
  const std::string contents = test::read_file(path);
  EXPECT_EQ(contents.substr(0, 4096), std::string(4096, '\0'));
  EXPECT_EQ(contents.substr(40 * kMiB + 2 * 4096), std::string(4096, '\0'));
  for (std::size_t block = 1; block < contents.size() / 4096 - 1; block += 100) {
    EXPECT_NE(contents.substr(block * 4096, 4096), std::string(4096, '\0')) << block;
  }
}

TEST_P(IoMeasureTest, NonsenseIsRefused) {
  const DirectFile file = test::make_file(*directory_ / "file", kMiB);
  const IoWorkload good{.block_bytes = 4096, .depth = 1, .bytes = kMiB, .seconds = 0.001};
  const auto refused = [&](auto change) {
    IoWorkload bad = good;
    change(bad);
    EXPECT_THROW((void)measure_io(GetParam().engine, file, bad), InvalidArgument);
  };
  refused([](IoWorkload& bad) { bad.block_bytes = 5000; });
  refused([](IoWorkload& bad) { bad.block_bytes = 0; });
  refused([](IoWorkload& bad) { bad.block_bytes = 2 * kMiB; });
  refused([](IoWorkload& bad) { bad.begin = 1; });
  refused([](IoWorkload& bad) { bad.depth = 0; });
  refused([](IoWorkload& bad) { bad.seconds = 0.0; });
  refused([](IoWorkload& bad) { bad.seconds = -1.0; });
}

TEST_P(IoMeasureTest, ARangeBeyondTheFileIsAnError) {
  const DirectFile file = test::make_file(*directory_ / "file", kMiB);
  const IoWorkload workload{.block_bytes = kMiB, .depth = 2, .bytes = 4 * kMiB, .seconds = 1.0};
  EXPECT_THROW((void)measure_io(GetParam().engine, file, workload), IoError);
}

INSTANTIATE_TEST_SUITE_P(Every, IoMeasureTest, ::testing::ValuesIn(test::every_place()),
                         [](const auto& instance) { return instance.param.name; });

TEST(IoMixTest, NamesAreParsed) {
  EXPECT_EQ(parse_io_mix("read"), IoMix::kRead);
  EXPECT_EQ(parse_io_mix("write"), IoMix::kWrite);
  EXPECT_EQ(parse_io_mix("mixed"), IoMix::kMixed);
  EXPECT_THROW((void)parse_io_mix("rw"), InvalidArgument);
}

}  // namespace
}  // namespace castor
