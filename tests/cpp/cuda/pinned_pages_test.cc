#include "cuda/pinned_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cuda/fake_cuda_runtime.h"
#include "host/adversary_pages.h"
#include "host/forks.h"
#include "host/host_arena.h"
#include "host/mmap_arena.h"

#if defined(CASTOR_HAVE_JEMALLOC)
#include "host/jemalloc_arena.h"
#endif

namespace castor::cuda {
namespace {

using testing::AdversaryPages;
using testing::FakeCuda;
using testing::in_forked_child;
using testing::is_mapped;
using testing::PageControls;

class PinnedPagesTest : public ::testing::Test {
 protected:
  std::unique_ptr<PinnedPages> make_pages() {
    return std::make_unique<PinnedPages>(std::make_unique<AdversaryPages>(controls_), 0);
  }

  FakeCuda fake_;
  const std::size_t page_ = system_page_sizes().page;
  std::shared_ptr<PageControls> controls_ = std::make_shared<PageControls>();
  std::unique_ptr<PinnedPages> pages_ = make_pages();
};

TEST_F(PinnedPagesTest, RegistersExactlyWhatIsMapped) {
  std::byte* const data = pages_->map(3 * page_, page_);
  ASSERT_NE(data, nullptr);
  EXPECT_EQ(fake_.registered_bytes(), 3 * page_);
  EXPECT_EQ(pages_->registered_bytes(), 3 * page_);
  EXPECT_EQ(controls_->resident_bytes, 3 * page_);
  EXPECT_EQ(fake_.last_register_flags(),
            static_cast<unsigned>(cudaHostRegisterPortable | cudaHostRegisterMapped));
  EXPECT_TRUE(pages_->unmap(data, 3 * page_));
  EXPECT_EQ(fake_.num_registrations(), 0u);
  EXPECT_EQ(controls_->live_bytes, 0u);
}

TEST_F(PinnedPagesTest, ARefusedRegistrationGivesThePagesBackAndSaysWhy) {
  fake_.fail_call("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  errno = 0;
  EXPECT_EQ(pages_->map(page_, page_), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(controls_->live_bytes, 0u);
  EXPECT_NE(pages_->description().find("1 call(s) refused, the last with"), std::string::npos);
  EXPECT_NE(pages_->description().find("(2)"), std::string::npos);
}

TEST_F(PinnedPagesTest, RefusedPagesAreNotRegistered) {
  controls_->refuse_map_call = 1;
  EXPECT_EQ(pages_->map(page_, page_), nullptr);
  EXPECT_EQ(fake_.num_calls("cudaHostRegister"), 0u);
}

TEST_F(PinnedPagesTest, APartStaysUntilTheRestIsUnmapped) {
  std::byte* const data = pages_->map(4 * page_, page_);
  ASSERT_NE(data, nullptr);
  EXPECT_TRUE(pages_->unmap(data + page_, page_));
  EXPECT_EQ(pages_->held_bytes(), page_);
  EXPECT_EQ(fake_.registered_bytes(), 4 * page_);
  EXPECT_TRUE(pages_->unmap(data + 2 * page_, 2 * page_));
  EXPECT_EQ(pages_->held_bytes(), 3 * page_);
  EXPECT_TRUE(pages_->unmap(data, page_));
  EXPECT_EQ(pages_->held_bytes(), 0u);
  EXPECT_EQ(fake_.num_registrations(), 0u);
  EXPECT_EQ(controls_->live_bytes, 0u);
}

TEST_F(PinnedPagesTest, AUnionOfMappingsIsUnmappedOneByOne) {
  // Mappings that lie side by side: of two in a row, the system gives the later the lower address.
  std::vector<std::byte*> mapped;
  for (int i = 0; i < 16; ++i)
    mapped.push_back(pages_->map(page_, page_));
  std::sort(mapped.begin(), mapped.end());
  std::size_t count = 1;
  while (count < mapped.size() && mapped[count] == mapped[0] + count * page_)
    ++count;
  EXPECT_TRUE(pages_->unmap(mapped[0], count * page_));
  EXPECT_EQ(fake_.num_registrations(), mapped.size() - count);
  for (std::size_t i = count; i < mapped.size(); ++i)
    EXPECT_TRUE(pages_->unmap(mapped[i], page_));
  EXPECT_EQ(controls_->live_bytes, 0u);
}

TEST_F(PinnedPagesTest, RegisteredPagesAreNotDiscarded) {
  std::byte* const data = pages_->map(page_, page_);
  data[0] = std::byte{5};
  EXPECT_FALSE(pages_->discard(data, page_));
  EXPECT_EQ(data[0], std::byte{5});
  EXPECT_EQ(controls_->num_discards, 0u);
  EXPECT_TRUE(pages_->unmap(data, page_));
}

TEST_F(PinnedPagesTest, ForkedChildrenNeverGetRegisteredPages) {
  if (!testing::kMappingsTell) {
    GTEST_SKIP() << "a sanitizer maps memory of its own";
  }
  std::byte* const data = pages_->map(2 * page_, page_);
  ASSERT_NE(data, nullptr);
  const auto mapped = [&] { return is_mapped(data, page_) || is_mapped(data + page_, page_); };
  EXPECT_TRUE(mapped());
  EXPECT_EQ(in_forked_child([&] { return mapped() ? 1 : 0; }), 0);
  pages_->share_with_children(data, 2 * page_);  // who owns them may: registered they stay
  EXPECT_EQ(in_forked_child([&] { return mapped() ? 1 : 0; }), 0);
  EXPECT_TRUE(pages_->unmap(data, 2 * page_));
}

TEST_F(PinnedPagesTest, PagesThatCudaKeepsAreNeitherUnmappedNorReused) {
  std::byte* const data = pages_->map(page_, page_);
  fake_.fail_call("cudaHostUnregister", 1, cudaErrorIllegalAddress);
  EXPECT_TRUE(pages_->unmap(data, page_));
  EXPECT_EQ(controls_->live_bytes, page_);  // the device may still write there
  EXPECT_NE(pages_->description().find("could not be given back"), std::string::npos);
}

TEST_F(PinnedPagesTest, AnArenaOverItGivesBlocksTheirOwnSize) {
  HostArenaOptions options;
  const PinnedPages* pinned = nullptr;
  options.adapt_pages = [&](std::unique_ptr<PageSource> os) {
    auto pages = std::make_unique<PinnedPages>(std::move(os), 0);
    pinned = pages.get();
    return pages;
  };
  const auto arena = make_host_arena(options);
  const std::size_t bytes = (std::size_t{5} << 20) + 1;  // jemalloc's class for it is 6 MiB
  std::byte* const data = arena->allocate(bytes);
  EXPECT_EQ(fake_.registered_bytes(), (std::size_t{5} << 20) + page_);
  EXPECT_NE(arena->description().find("registered with CUDA"), std::string::npos);
  arena->deallocate(data, bytes);
  EXPECT_EQ(pinned->registered_bytes(), 0u);
}

TEST_F(PinnedPagesTest, AnArenaNamesARefusal) {
  MmapArena arena(make_pages());
  fake_.fail_call("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  EXPECT_THROW((void)arena.allocate(page_), OutOfMemory);
}

#if defined(CASTOR_HAVE_JEMALLOC)
TEST_F(PinnedPagesTest, JemallocsExtentsArePinnedAndGivenBack) {
  {
    JemallocArena arena(make_pages());
    std::vector<std::pair<std::byte*, std::size_t>> blocks;
    for (std::size_t bytes = 64; bytes < (std::size_t{8} << 20); bytes = bytes * 3 + 64) {
      blocks.emplace_back(arena.allocate(bytes), bytes);
      ASSERT_GE(fake_.registered_bytes(), bytes);
    }
    for (const auto& [data, bytes] : blocks)
      arena.deallocate(data, bytes);
  }
  EXPECT_EQ(fake_.num_registrations(), 0u);
  EXPECT_EQ(controls_->live_bytes, 0u);
}
#endif

TEST_F(PinnedPagesTest, ManyThreadsMapAndUnmap) {
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([this] {
        for (std::size_t i = 1; i < 100; ++i) {
          const std::size_t bytes = (i % 5 + 2) * page_;
          std::byte* const data = pages_->map(bytes, page_);
          ASSERT_NE(data, nullptr);
          EXPECT_TRUE(pages_->unmap(data, page_));
          EXPECT_TRUE(pages_->unmap(data + page_, bytes - page_));
        }
      });
    }
  }
  EXPECT_EQ(fake_.num_registrations(), 0u);
  EXPECT_EQ(controls_->live_bytes, 0u);
}

}  // namespace
}  // namespace castor::cuda
