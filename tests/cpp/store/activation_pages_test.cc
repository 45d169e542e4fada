// Six pages of 1 MiB behind a window of two buffers.

#include "store/activation_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "core/fakes.h"
#include "core/random_bytes.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kPage = ActivationPages::kPageBytes;
constexpr std::size_t kPages = 6;

class ActivationPagesTest : public ::testing::Test {
 protected:
  void SetUp() override { make(); }

  void make(const std::string& faults = "") {
    pages_.reset();
    nvme_.reset();
    const ScopedFaults scope(faults);
    NvmeContent content{.name = "activations", .chunks = {}, .num_slots = 2};
    for (std::size_t i = 0; i < kPages; ++i) {
      content.chunks.push_back({{"page " + std::to_string(i), kPage}});
    }
    nvme_ = std::make_unique<NvmeTier>(NvmeOptions{.directories = {directory_.string()},
                                                   .budget_bytes = kPages * kPage,
                                                   .engine = IoEngineKind::kThreads,
                                                   .replace_engine = ScopedFaults::replace,
                                                   .depth = 2},
                                       std::span(&content, 1), host_, executor_);
    pages_ = std::make_unique<ActivationPages>(*nvme_->stream(0), kPages);
  }
  void write(const ActivationPages::Pages& pages, const Bytes& values) const {
    pages_->write(pages, values.size(), [&](std::size_t offset, std::span<std::byte> page) {
      std::memcpy(page.data(), values.data() + offset, page.size());
    });
  }
  [[nodiscard]] Bytes read(const ActivationPages::Pages& pages, std::size_t bytes) const {
    Bytes values(bytes);
    pages_->read(pages, bytes, [&](std::size_t offset, std::span<std::byte> page) {
      std::memcpy(values.data() + offset, page.data(), page.size());
    });
    return values;
  }

  const test::TempDirectory directory_{"/dev/shm"};
  MemoryTier host_{TierKind::kHost, std::size_t{1} << 30,
                   std::make_unique<HeapArena>(std::make_shared<LiveBlocks>())};
  test::SerialExecutor executor_;
  std::unique_ptr<NvmeTier> nvme_;
  std::unique_ptr<ActivationPages> pages_;
};

TEST_F(ActivationPagesTest, BytesTakeWholePages) {
  EXPECT_EQ(pages_->free_bytes(), kPages * kPage);
  EXPECT_EQ(pages_->try_take(1)->size(), 1U);
  EXPECT_EQ(pages_->try_take(kPage)->size(), 1U);
  EXPECT_EQ(pages_->try_take(kPage + 1)->size(), 2U);
  EXPECT_EQ(pages_->free_bytes(), 2 * kPage);
}

TEST_F(ActivationPagesTest, NoBytesTakeNoPage) {
  const auto pages = pages_->try_take(0);
  ASSERT_TRUE(pages);
  EXPECT_TRUE(pages->empty());
  write(*pages, {});
  EXPECT_TRUE(read(*pages, 0).empty());
  pages_->announce(*pages);
  EXPECT_EQ(pages_->free_bytes(), kPages * kPage);
}

TEST_F(ActivationPagesTest, AllPagesFitExactlyAndOneByteMoreTakesNone) {
  EXPECT_FALSE(pages_->try_take(kPages * kPage + 1));
  EXPECT_EQ(pages_->free_bytes(), kPages * kPage);
  const auto all = pages_->try_take(kPages * kPage);
  ASSERT_TRUE(all);
  EXPECT_EQ(std::set<std::size_t>(all->begin(), all->end()).size(), kPages);
  EXPECT_EQ(pages_->free_bytes(), 0U);
  EXPECT_FALSE(pages_->try_take(1));
  pages_->give_back(*all);
  EXPECT_TRUE(pages_->try_take(kPages * kPage));
}

TEST_F(ActivationPagesTest, ReadsGiveWhatWasWritten) {
  for (const std::size_t bytes : {std::size_t{1}, kPage - 1, kPage, kPage + 1, kPages * kPage}) {
    const auto pages = pages_->try_take(bytes);
    ASSERT_TRUE(pages);
    const Bytes values = random_bytes(bytes, static_cast<unsigned>(bytes));
    write(*pages, values);
    EXPECT_TRUE(read(*pages, bytes) == values) << bytes;
    EXPECT_TRUE(read(*pages, bytes) == values) << bytes;
    pages_->give_back(*pages);
  }
}

TEST_F(ActivationPagesTest, AWriteReadsNothingOfWhatThePageHad) {
  const auto pages = pages_->try_take(kPages * kPage);
  write(*pages, random_bytes(kPages * kPage, 1));
  const Bytes values = random_bytes(kPages * kPage, 2);
  write(*pages, values);
  EXPECT_EQ(nvme_->counts().read_bytes, 0U);
  EXPECT_TRUE(read(*pages, values.size()) == values);
}

TEST_F(ActivationPagesTest, AnnouncedPagesAreReadAheadAsFarAsTheWindowReaches) {
  const auto pages = pages_->try_take(4 * kPage);
  write(*pages, random_bytes(4 * kPage, 1));
  nvme_->stream(0)->flush();
  pages_->announce(*pages);
  EXPECT_EQ(nvme_->counts().read_bytes, kPage);  // max_ahead() of two buffers is one
  pages_->forget_announced();
  EXPECT_TRUE(read(*pages, 4 * kPage) == random_bytes(4 * kPage, 1));
  EXPECT_LE(nvme_->counts().read_bytes, 4 * kPage);  // none is read twice
}

TEST_F(ActivationPagesTest, AWriteThatFailsIsTheErrorOfWhoNeedsItsBuffer) {
  make("write:1:ENOSPC");
  const auto pages = pages_->try_take(4 * kPage);
  const Bytes values = random_bytes(4 * kPage, 1);
  EXPECT_THROW(write(*pages, values), IoError);
  EXPECT_TRUE(nvme_->stream(0)->torn());
  write(*pages, values);  // a page that is written anew is whole
  EXPECT_TRUE(read(*pages, values.size()) == values);
}

TEST_F(ActivationPagesTest, AReadThatFailsIsTheReadersErrorAndMayBeTriedAgain) {
  make("read:2:EIO");
  const auto pages = pages_->try_take(4 * kPage);
  const Bytes values = random_bytes(4 * kPage, 1);
  write(*pages, values);
  EXPECT_THROW(static_cast<void>(read(*pages, values.size())), IoError);
  EXPECT_TRUE(read(*pages, values.size()) == values);
}

TEST_F(ActivationPagesTest, AFlippedBitIsFound) {
  make("read:1:flip");
  const auto pages = pages_->try_take(4 * kPage);
  write(*pages, random_bytes(4 * kPage, 1));
  EXPECT_THROW(static_cast<void>(read(*pages, 4 * kPage)), CorruptionError);
}

TEST_F(ActivationPagesTest, ThreadsNeverShareAPage) {
  {
    std::vector<std::jthread> threads;
    for (unsigned thread = 0; thread < 3; ++thread) {
      threads.emplace_back([this, thread] {
        for (int round = 0; round < 6; ++round) {
          const std::size_t bytes = kPage + 1000 * thread;  // one page or two
          const auto pages = pages_->try_take(bytes);
          ASSERT_TRUE(pages);
          const Bytes values(bytes, static_cast<std::byte>(16 * thread + 1));
          write(*pages, values);
          EXPECT_TRUE(read(*pages, bytes) == values);
          pages_->give_back(*pages);
        }
      });
    }
  }
  EXPECT_EQ(pages_->free_bytes(), kPages * kPage);
}

}  // namespace
}  // namespace castor::testing
