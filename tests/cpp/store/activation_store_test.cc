// Blocks of 4 KiB on a device whose copies run on the caller, or beside it.

#include "store/activation_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "io/test_support.h"
#include "parallel/async_copy_engine.h"
#include "parallel/immediate_copy_engine.h"
#include "store/charged_memory.h"
#include "store/fake_device.h"
#include "store/small_model.h"

namespace castor::testing {
namespace {

constexpr std::size_t kBytes = 4096;

class Weak final : public ActivationStore::Original {
 public:
  explicit Weak(std::weak_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}
  [[nodiscard]] std::shared_ptr<DeviceMemory> lock() const override { return memory_.lock(); }
  [[nodiscard]] bool expired() const noexcept override { return memory_.expired(); }

 private:
  const std::weak_ptr<DeviceMemory> memory_;
};

class ActivationStoreTest : public ::testing::Test {
 protected:
  struct Room {
    std::size_t device = kGiB;
    std::size_t host = kGiB;
    std::size_t nvme = 0;
  };
  void make(Room room, CopyEngine* copies = nullptr) {
    SessionOptions options;
    options.backend = std::make_shared<FakeDevice>();
    options.budgets =
        std::make_shared<SharedBudgets>(room.device, room.host, std::max(room.nvme, kMiB));
    options.state.rule = adam();
    options.name = "model";
    options.num_threads = 1;
    if (room.nvme > 0) {
      options.state.nvme = NvmeOptions{.directories = {directory_.string()},
                                       .budget_bytes = room.nvme,
                                       .engine = IoEngineKind::kThreads,
                                       .holds_activations = true,
                                       .depth = 2};
    }
    const std::vector<Placement> placements(1, Placement::kStream);
    memory_ =
        std::make_shared<SessionMemory>(SmallModel::row(1, 16).layout(64), placements, options);
    account_ = memory_->nonmodel();
    store_ = std::make_shared<ActivationStore>(
        ActivationStore::Parts{.owner = memory_,
                               .memory = *memory_,
                               .copies = copies == nullptr ? immediate_ : *copies,
                               .take = charged_to(account_)});
  }
  [[nodiscard]] std::shared_ptr<DeviceMemory> filled(char value) const {
    auto memory = std::make_shared<ChargedMemory>(account_, kBytes);
    std::memset(memory->data(), value, kBytes);
    return memory;
  }
  [[nodiscard]] std::shared_ptr<ActivationStore::Kept> keep(
      const std::shared_ptr<ActivationStore::Pass>& pass,
      const std::shared_ptr<DeviceMemory>& memory) const {
    return store_->keep(*pass, memory.get(), [&] { return std::make_unique<Weak>(memory); });
  }
  static void expect_filled(const std::shared_ptr<DeviceMemory>& memory, char value) {
    const std::string expected(kBytes, value);
    ASSERT_EQ(memory->bytes(), kBytes);
    EXPECT_EQ(std::memcmp(memory->data(), expected.data(), kBytes), 0);
  }
  [[nodiscard]] std::size_t on_host() const { return memory_->host_tier()->ledger().used(); }

  const test::TempDirectory directory_{"/dev/shm"};
  ImmediateCopyEngine immediate_;
  std::shared_ptr<SessionMemory> memory_;
  std::shared_ptr<NonModelMemory> account_;
  std::shared_ptr<ActivationStore> store_;
};

TEST_F(ActivationStoreTest, MemoryOfABlockLeavesWithTheNextAndComesBackWithItsBytes) {
  make({});
  const std::size_t host = on_host();
  const auto pass = store_->begin();
  const auto kept = keep(pass, filled('a'));
  EXPECT_EQ(account_->bytes(), kBytes);
  const auto next = store_->begin();
  EXPECT_EQ(account_->bytes(), 0U);
  EXPECT_EQ(on_host() - host, kBytes);
  EXPECT_EQ(store_->figures().bytes_offloaded, kBytes);
  expect_filled(store_->restore(pass, *kept), 'a');
  EXPECT_EQ(account_->bytes(), kBytes);
}

TEST_F(ActivationStoreTest, TheLastBlockIsNeverCopied) {
  make({});
  const auto pass = store_->begin();
  const auto memory = filled('a');
  const auto kept = keep(pass, memory);
  EXPECT_EQ(store_->restore(pass, *kept)->data(), memory->data());
  EXPECT_EQ(store_->figures().bytes_offloaded, 0U);
}

TEST_F(ActivationStoreTest, OneMemoryIsKeptOnce) {
  make({});
  const auto pass = store_->begin();
  const auto memory = filled('a');
  const auto kept = keep(pass, memory);
  EXPECT_EQ(keep(pass, memory), kept);
  (void)store_->begin();
  EXPECT_EQ(store_->figures().bytes_offloaded, kBytes);
}

TEST_F(ActivationStoreTest, MemoryThatOthersHoldIsReadWhereItIs) {
  make({});
  const auto pass = store_->begin();
  const auto memory = filled('a');
  const auto kept = keep(pass, memory);
  const auto next = store_->begin();
  EXPECT_EQ(account_->bytes(), kBytes);
  EXPECT_EQ(store_->restore(pass, *kept)->data(), memory->data());
}

TEST_F(ActivationStoreTest, WhatNobodyNeedsGivesItsHostBufferBack) {
  make({});
  const std::size_t host = on_host();
  const auto pass = store_->begin();
  auto kept = keep(pass, filled('a'));
  const auto next = store_->begin();
  EXPECT_EQ(store_->figures().ready_host_bytes, 0U);
  kept.reset();
  EXPECT_EQ(store_->figures().ready_host_bytes, kBytes);
  EXPECT_EQ(on_host() - host, kBytes) << "kept for the next pass";
}

TEST_F(ActivationStoreTest, BesideTheComputeABlockStaysForOneMoreAndTheNextIsFetchedAhead) {
  AsyncCopyEngine copies;
  make({}, &copies);
  const auto first = store_->begin();
  const auto a = keep(first, filled('a'));
  const auto second = store_->begin();
  const auto b = keep(second, filled('b'));
  EXPECT_EQ(account_->bytes(), 2 * kBytes);
  const auto third = store_->begin();
  EXPECT_EQ(account_->bytes(), kBytes);
  const auto fourth = store_->begin();
  EXPECT_EQ(account_->bytes(), 0U);
  expect_filled(store_->restore(second, *b), 'b');
  EXPECT_EQ(account_->bytes(), 2 * kBytes) << "the block before comes at once";
  expect_filled(store_->restore(first, *a), 'a');
}

TEST_F(ActivationStoreTest, WhatTheHostHasNoRoomForGoesToNvmeAndComesBack) {
  make({.host = 64 * kMiB, .nvme = 64 * kMiB});
  const auto pass = store_->begin();
  std::vector<std::shared_ptr<ActivationStore::Kept>> kept;
  const std::size_t free_before = store_->figures().ready_nvme_bytes;
  ASSERT_GT(free_before, 0U);
  const Reservation rest =
      memory_->host_tier()->ledger().reserve(memory_->host_tier()->ledger().available(), "");
  kept.push_back(keep(pass, filled('a')));
  const auto next = store_->begin();
  EXPECT_EQ(free_before - store_->figures().ready_nvme_bytes, ActivationPages::kPageBytes);
  EXPECT_EQ(account_->bytes(), 0U);
  expect_filled(store_->restore(pass, *kept[0]), 'a');
  kept.clear();
  EXPECT_EQ(store_->figures().ready_nvme_bytes, free_before);
}

TEST_F(ActivationStoreTest, AFullHostWithoutNvmeThrowsAndKeepsTheMemory) {
  make({});
  const auto pass = store_->begin();
  const auto kept = keep(pass, filled('a'));
  Reservation rest =
      memory_->host_tier()->ledger().reserve(memory_->host_tier()->ledger().available(), "");
  EXPECT_THROW((void)store_->begin(), OutOfMemory);
  rest = Reservation();
  expect_filled(store_->restore(pass, *kept), 'a');
}

}  // namespace
}  // namespace castor::testing
