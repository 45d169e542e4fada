// Two kinds of payloads, as parameters and optimizer states are, in one tier.

#include "io/nvme_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/units.h"
#include "io/test_support.h"

namespace castor {
namespace {

constexpr std::size_t kChunks = 6;

NvmeContent content(const std::string& name, std::size_t bytes, std::size_t num_slots) {
  NvmeContent found{.name = name, .chunks = {}, .num_slots = num_slots};
  for (std::size_t i = 0; i < kChunks; ++i) {
    found.chunks.push_back({{name + " of chunk " + std::to_string(i), bytes}});
  }
  return found;
}

class NvmeTierTest : public test::PlaceTest {
 protected:
  void SetUp() override {
    PlaceTest::SetUp();
    give_host(kGiB);
  }

  void give_host(std::size_t bytes) {
    host_ = std::make_unique<MemoryTier>(
        TierKind::kHost, bytes,
        std::make_unique<testing::HeapArena>(std::make_shared<testing::LiveBlocks>()));
  }

  [[nodiscard]] NvmeOptions options(std::uint64_t budget_bytes = kGiB) const {
    return {.directories = {directory_->string()},
            .budget_bytes = budget_bytes,
            .engine = GetParam().engine,
            .block_bytes = 64 * kKiB,
            .depth = 4};
  }
  std::unique_ptr<NvmeTier> make(const NvmeOptions& options) {
    return std::make_unique<NvmeTier>(options, contents_, *host_, executor_);
  }

  test::SerialExecutor executor_;
  std::unique_ptr<MemoryTier> host_;
  std::vector<NvmeContent> contents_{content("weights", 10'000, 5), content("states", 300'000, 3)};
};

TEST_P(NvmeTierTest, AllContentsAreInOneFileBehindOneEngine) {
  const auto tier = make(options());
  EXPECT_EQ(tier->used_bytes(), contents_[0].stored_bytes() + contents_[1].stored_bytes());
  EXPECT_EQ(tier->stream(0)->stored_bytes(), kChunks * align_up(10'000, kIoAlignment));
  EXPECT_EQ(tier->stream(1)->stored_bytes(), kChunks * align_up(300'000, kIoAlignment));
  EXPECT_EQ(host_->ledger().used(), contents_[0].window_bytes() + contents_[1].window_bytes());
  const std::filesystem::directory_iterator files(directory_->string());
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
  const std::string description = tier->description();
  EXPECT_NE(description.find("; weights through a window of"), std::string::npos) << description;
  EXPECT_NE(description.find(" in 5 slots; states through"), std::string::npos) << description;
  EXPECT_TRUE(description.ends_with(" in 3 slots")) << description;
}

TEST_P(NvmeTierTest, AContentWithoutPayloadsHasNoWindow) {
  contents_[0].chunks.assign(kChunks, {});
  const auto tier = make(options());
  EXPECT_EQ(tier->stream(0), nullptr);
  EXPECT_EQ(host_->ledger().used(), contents_[1].window_bytes());
  EXPECT_EQ(tier->description().find("weights"), std::string::npos);
}

TEST_P(NvmeTierTest, ThreadsWorkOnEachContentBesideTheOther) {
  const auto tier = make(options());
  const auto count_up = [&](std::size_t which) {
    ChunkStream& stream = *tier->stream(which);
    for (int round = 0; round < 20; ++round) {
      for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
        stream.prefetch((chunk + 1) % kChunks);
        stream.use(chunk, StreamAccess::kUpdate, [&](std::span<const std::span<std::byte>> held) {
          for (std::byte& value : held[0]) {
            value = static_cast<std::byte>(static_cast<unsigned>(value) + chunk + which + 1);
          }
        });
      }
    }
    stream.flush();
  };
  std::thread weights(count_up, 0);
  count_up(1);
  weights.join();
  for (std::size_t which = 0; which < 2; ++which) {
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      tier->stream(which)->use(
          chunk, StreamAccess::kRead, [&](std::span<const std::span<std::byte>> held) {
            const auto expected = static_cast<std::byte>(20 * (chunk + which + 1));
            EXPECT_EQ(std::count(held[0].begin(), held[0].end(), expected),
                      static_cast<std::ptrdiff_t>(held[0].size()));
          });
    }
  }
  const auto counts = [&](std::size_t which) { return tier->stream(which)->counts(); };
  EXPECT_EQ(tier->counts().read_bytes, counts(0).read_bytes + counts(1).read_bytes);
  EXPECT_EQ(tier->counts().written_bytes, counts(0).written_bytes + counts(1).written_bytes);
}

TEST_P(NvmeTierTest, TheBudgetsAreThoseOfAllContentsTogether) {
  const std::uint64_t needed = contents_[0].stored_bytes() + contents_[1].stored_bytes();
  EXPECT_EQ(make(options(needed))->used_bytes(), needed);
  try {
    make(options(needed - 1));
    FAIL() << "took more than its budget";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.tier(), TierKind::kNvme);
    EXPECT_EQ(error.requested(), needed);
    EXPECT_NE(std::string(error.what()).find("weights of chunk 0 and 11 more"), std::string::npos);
  }
  const std::size_t windows = contents_[0].window_bytes() + contents_[1].window_bytes();
  give_host(windows - 1);
  try {
    make(options());
    FAIL() << "took more than the host has";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.tier(), TierKind::kHost);
    EXPECT_EQ(error.requested(), contents_[1].window_bytes());
    EXPECT_NE(std::string(error.what()).find("states of chunk 0 and 5 more"), std::string::npos);
  }
  EXPECT_TRUE(directory_->empty());
  EXPECT_EQ(host_->ledger().used(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Places, NvmeTierTest, ::testing::ValuesIn(test::every_place()),
                         [](const auto& place) { return place.param.name; });

}  // namespace
}  // namespace castor
