#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/gpu_test.h"
#include "cuda/pinned_pages.h"
#include "cuda/stream_copy_engine.h"
#include "cuda/stream_order.h"
#include "host/mmap_arena.h"

namespace castor::cuda {
namespace {

using testing::DeviceBuffer;
using testing::GpuTest;
using testing::ScopedStream;

constexpr std::size_t kBytes = std::size_t{4} << 20;

class GpuCopyTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFailure())
      return;
    auto pages = std::make_unique<PinnedPages>(std::make_unique<OsPages>(), 0);
    pages_ = pages.get();
    arena_ = std::make_unique<MmapArena>(std::move(pages));
    for (auto& host : hosts_)
      host = {arena_->allocate(kBytes), kBytes};
    for (auto& slot : slots_)
      slot = std::make_unique<DeviceBuffer>(kBytes);
    compute_ = std::make_unique<ScopedStream>();
    engine_ = std::make_unique<StreamCopyEngine>(0);
  }
  void TearDown() override {
    engine_.reset();
    for (const auto& host : hosts_) {
      if (host.data() != nullptr)
        arena_->deallocate(host.data(), host.size());
    }
  }

  CopyTicket copy_in(std::size_t slot, std::size_t host) {
    return engine_->submit({.source = hosts_[host],
                            .target = slots_[slot]->span(),
                            .direction = CopyDirection::kHostToDevice,
                            .behind = compute(),
                            .await_source = {}});
  }
  CopyTicket copy_out(std::size_t host, std::size_t slot) {
    return engine_->submit({.source = slots_[slot]->span(),
                            .target = hosts_[host],
                            .direction = CopyDirection::kDeviceToHost,
                            .behind = compute(),
                            .await_source = {}});
  }
  [[nodiscard]] StreamId compute() const { return stream_id(compute_->get()); }
  /// A kernel of the compute stream, as far as ordering goes.
  void fill_slot(std::size_t slot, int value) {
    check(cudaMemsetAsync(slots_[slot]->data(), value, kBytes, compute_->get()), "cudaMemsetAsync");
  }
  void fill_host(std::size_t host, int value) { std::memset(hosts_[host].data(), value, kBytes); }
  [[nodiscard]] bool host_holds(std::size_t host, int value) const {
    for (const std::byte byte : hosts_[host]) {
      if (byte != static_cast<std::byte>(value))
        return false;
    }
    return true;
  }

  const PinnedPages* pages_ = nullptr;  // owned by arena_
  std::unique_ptr<MmapArena> arena_;
  std::array<std::span<std::byte>, 4> hosts_{};
  std::array<std::unique_ptr<DeviceBuffer>, 4> slots_;
  std::unique_ptr<ScopedStream> compute_;
  std::unique_ptr<StreamCopyEngine> engine_;
};

TEST_F(GpuCopyTest, WhatGoesInComesOut) {
  fill_host(0, 7);
  engine_->order(copy_in(0, 0), compute());
  engine_->wait(copy_out(1, 0));
  EXPECT_TRUE(host_holds(1, 7));
}

TEST_F(GpuCopyTest, ASlotIsReusedOnlyAfterComputeIsDoneWithIt) {
  for (int round = 0; round < 50; ++round) {
    fill_host(0, round);
    engine_->order(copy_in(0, 0), compute());
    // The slot's user: reads it late, into a slot of its own.
    for (int i = 0; i < 10; ++i)
      fill_slot(2, i);
    check(cudaMemcpyAsync(slots_[1]->data(), slots_[0]->data(), kBytes, cudaMemcpyDeviceToDevice,
                          compute_->get()),
          "cudaMemcpyAsync");
    if (round % 2 == 0)
      engine_->release(slots_[0]->span(), compute());
    fill_host(1, 255);
    const CopyTicket overwrite = copy_in(0, 1);
    engine_->wait(copy_out(2, 1));
    ASSERT_TRUE(host_holds(2, round)) << round;
    engine_->wait(overwrite);  // before the host writes its source again
  }
}

TEST_F(GpuCopyTest, CopiesOfBothDirectionsKeepTheirOrderOnTheSameBytes) {
  for (int round = 1; round < 50; ++round) {
    fill_host(1, 255);
    fill_slot(0, round);
    (void)copy_out(0, 0);
    engine_->release(slots_[0]->span(), compute());
    const CopyTicket last = copy_in(0, 1);
    (void)copy_in(1, 0);
    engine_->wait(copy_out(2, 1));
    engine_->wait(last);
    ASSERT_TRUE(host_holds(2, round)) << round;
  }
}

TEST_F(GpuCopyTest, PageableMemoryIsRefused) {
  std::vector<std::byte> pageable(kBytes);
  EXPECT_THROW((void)engine_->submit({.source = pageable,
                                      .target = slots_[0]->span(),
                                      .direction = CopyDirection::kHostToDevice,
                                      .behind = compute(),
                                      .await_source = {}}),
               InvalidArgument);
}

TEST_F(GpuCopyTest, PinnedPagesAreReadByTheDeviceAtTheirHostAddress) {
  void* on_device = nullptr;
  ASSERT_EQ(cudaHostGetDevicePointer(&on_device, hosts_[0].data(), 0), cudaSuccess);
  EXPECT_EQ(on_device, hosts_[0].data());
}

TEST_F(GpuCopyTest, PinnedPagesAreUnregisteredWithTheirBlock) {
  const std::size_t before = pages_->registered_bytes();
  const std::size_t bytes = (std::size_t{3} << 20) + 5;
  std::byte* const data = arena_->allocate(bytes);
  EXPECT_EQ(pages_->registered_bytes() - before, (std::size_t{3} << 20) + system_page_sizes().page);
  cudaPointerAttributes attributes{};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, data + bytes - 1), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  arena_->deallocate(data, bytes);
  EXPECT_EQ(pages_->registered_bytes(), before);
}

}  // namespace
}  // namespace castor::cuda
