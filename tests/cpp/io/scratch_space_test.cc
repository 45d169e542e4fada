#include "io/scratch_space.h"

#include <gtest/gtest.h>

#include <thread>

#include "core/error.h"
#include "core/units.h"
#include "io/io_engines.h"
#include "io/test_support.h"

namespace castor {
namespace {

using test::TempDirectory;

TEST(ScratchSpaceTest, OneFileIsOnePiece) {
  const TempDirectory directory;
  const ScratchSpace space({.directories = {directory.string()}, .bytes = 4 * kMiB});
  const auto memory = test::noise(3 * kMiB + 4096, 1);
  const auto pieces = space.pieces(8192, memory.span());
  ASSERT_EQ(pieces.size(), 1U);
  EXPECT_EQ(pieces[0].offset, ScratchFile::data_begin() + 8192);
  EXPECT_EQ(pieces[0].buffer.data(), memory.data());
  EXPECT_EQ(pieces[0].buffer.size(), memory.span().size());
}

TEST(ScratchSpaceTest, StripesGoRoundOverTheFilesAndCoverEveryByteOnce) {
  const TempDirectory a;
  const TempDirectory b;
  const TempDirectory c;
  const std::uint64_t stripe = 64 * kKiB;
  const ScratchSpace space({.directories = {a.string(), b.string(), c.string()},
                            .bytes = 30 * stripe,
                            .stripe_bytes = stripe});
  EXPECT_EQ(space.capacity(), 30 * stripe);
  const auto memory = test::noise(10 * stripe, 1);
  const auto pieces = space.pieces(stripe / 2, memory.span());
  ASSERT_EQ(pieces.size(), 11U);
  std::size_t done = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(pieces[i].file, i % 3);
    EXPECT_EQ(pieces[i].offset,
              ScratchFile::data_begin() + i / 3 * stripe + (i == 0 ? stripe / 2 : 0));
    EXPECT_EQ(pieces[i].buffer.data(), memory.data() + done);
    done += pieces[i].buffer.size();
  }
  EXPECT_EQ(done, memory.span().size());
}

TEST(ScratchSpaceTest, ExtentsComeBackAndExhaustionNamesTheTier) {
  const TempDirectory directory;
  ScratchSpace space({.directories = {directory.string()}, .bytes = 2 * kMiB});
  ScratchExtent first = space.allocate(kMiB + 1, "");
  EXPECT_EQ(first.bytes(), kMiB + 4096);
  try {
    (void)space.allocate(kMiB, "Give more");
    FAIL() << "allocated";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.tier(), TierKind::kNvme);
    EXPECT_EQ(error.requested(), kMiB);
    EXPECT_EQ(error.available(), kMiB - 4096);
    EXPECT_EQ(error.budget(), 2 * kMiB);
  }
  ScratchExtent moved = std::move(first);
  EXPECT_EQ(space.used_bytes(), kMiB + 4096);
  moved = space.allocate(4096, "");
  EXPECT_EQ(space.used_bytes(), 4096U);
  moved.reset();
  EXPECT_EQ(space.used_bytes(), 0U);
  EXPECT_EQ(space.peak_bytes(), kMiB + 8192);
  EXPECT_EQ(space.allocate(2 * kMiB, "").bytes(), 2 * kMiB);
}

TEST(ScratchSpaceTest, FailureInOneDirectoryLeavesNothingInTheOthers) {
  const TempDirectory a;
  EXPECT_THROW(ScratchSpace({.directories = {a.string(), a / "missing"}, .bytes = kMiB}), IoError);
  EXPECT_TRUE(a.empty());
}

TEST(ScratchSpaceTest, BadOptionsAreRefused) {
  const TempDirectory a;
  EXPECT_THROW(ScratchSpace({.directories = {}, .bytes = kMiB}), InvalidArgument);
  EXPECT_THROW(ScratchSpace({.directories = {a.string()}, .bytes = 0}), InvalidArgument);
  EXPECT_THROW(
      ScratchSpace(
          {.directories = {a.string(), a.string() + "/../" +
                                           std::filesystem::path(a.string()).filename().string()},
           .bytes = kMiB}),
      InvalidArgument);
  EXPECT_THROW(ScratchSpace({.directories = {a.string()}, .bytes = kMiB, .stripe_bytes = 1000}),
               InvalidArgument);
  const ScratchSpace space({.directories = {a.string()}, .bytes = kMiB});
  const auto memory = test::noise(8192, 1);
  EXPECT_THROW((void)space.pieces(space.capacity() - 4096, memory.span()), InvalidArgument);
  EXPECT_THROW((void)space.pieces(~std::uint64_t{0}, memory.span()), InvalidArgument);
}

TEST(ScratchSpaceTest, SeveralThreadsAllocateAtOnce) {
  const TempDirectory directory;
  ScratchSpace space({.directories = {directory.string()}, .bytes = 16 * kMiB});
  {
    std::vector<std::jthread> threads;
    for (std::size_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (std::size_t i = 1; i < 300; ++i) {
          const ScratchExtent extent = space.allocate(i * 4096, "");
          EXPECT_EQ(extent.bytes(), i * 4096);
        }
      });
    }
  }
  EXPECT_EQ(space.used_bytes(), 0U);
}

TEST(ScratchSpaceTest, CloseRemovesTheFilesAndTheDescriptionNamesThem) {
  const TempDirectory a;
  const TempDirectory b;
  ScratchSpace space({.directories = {a.string(), b.string()}, .bytes = 2 * kMiB});
  EXPECT_NE(space.description().find("2 files of 1.00 MiB"), std::string::npos)
      << space.description();
  EXPECT_NE(space.description().find(a / "castor.scratch"), std::string::npos);
  space.close();
  EXPECT_TRUE(a.empty());
  EXPECT_TRUE(b.empty());
}

}  // namespace
}  // namespace castor
