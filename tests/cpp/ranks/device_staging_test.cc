#include "ranks/device_staging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/thread_collectives.h"
#include "core/units.h"
#include "host/mmap_arena.h"
#include "parallel/thread_executor.h"
#include "ranks/rank_reduction.h"
#include "ranks/rank_weights.h"
#include "ranks/shared_file.h"

namespace castor {
namespace {

/// Between the host and a device whose memory holds every bit inverted: what reads or writes it
/// without a copy shows. A copy happens when it is waited for.
class InvertingCopies final : public CopyEngine {
 public:
  CopyTicket submit(const CopyRequest& request) override {
    EXPECT_FALSE(pending_.has_value());
    pending_ = request;
    return CopyTicket{++last_};
  }
  void wait(CopyTicket ticket) override {
    ASSERT_EQ(ticket, CopyTicket{last_});
    ASSERT_TRUE(pending_.has_value());
    std::ranges::transform(pending_->source, pending_->target.begin(),
                           [](std::byte byte) { return ~byte; });
    pending_.reset();
    ++num_copies_;
  }
  bool done(CopyTicket /*ticket*/) override { return !pending_.has_value(); }
  [[nodiscard]] bool asynchronous() const noexcept override { return true; }
  [[nodiscard]] int num_copies() const noexcept { return num_copies_; }

 private:
  std::optional<CopyRequest> pending_;
  std::uint64_t last_ = 0;
  int num_copies_ = 0;
};

/// Where a payload of floats is, and lives.
enum class Place { kHost, kResident, kDevice };

/// A rank's tiers, a payload on one of them, and the way between.
class Rank {
 public:
  /// `arena`: the arena of shared host storage; nullptr: the rank has its own.
  Rank(Place place, std::size_t bytes, std::unique_ptr<Arena> arena = nullptr)
      : place_(place),
        shared_(arena == nullptr
                    ? nullptr
                    : std::make_shared<MemoryTier>(TierKind::kHost, kGiB, std::move(arena))),
        payload_(std::make_unique<Payload>(place == Place::kDevice ? device_
                                           : shared_ != nullptr    ? shared_
                                                                   : host_,
                                           bytes, "",
                                           shared_ == nullptr ? nullptr : copies_of(host_))) {
    if (place == Place::kResident) {
      payload_->move_to(device_, device_->allocate(bytes, ""));
    }
  }

  static std::shared_ptr<HostBlocks> copies_of(const std::shared_ptr<MemoryTier>& host) {
    return std::make_shared<HostBlocks>(host, "", HostBlocks::Account::kNobody);
  }

  [[nodiscard]] DeviceStaging staging() {
    return {std::shared_ptr<CopyEngine>(std::shared_ptr<void>(), &copies), *device_,
            place_ == Place::kDevice ? host_->allocate(payload_->bytes(), "") : Block()};
  }
  [[nodiscard]] Payload& payload() const { return *payload_; }
  [[nodiscard]] MemoryTier& host() { return *host_; }
  void set(std::span<const float> values) {
    std::memcpy(payload_->data(), values.data(), payload_->bytes());
    invert();
  }
  [[nodiscard]] std::vector<float> values() {
    std::vector<float> values(payload_->bytes() / sizeof(float));
    invert();
    std::memcpy(values.data(), payload_->data(), payload_->bytes());
    invert();
    return values;
  }

  InvertingCopies copies;

 private:
  void invert() {
    if (place_ != Place::kHost) {
      const std::span bytes(payload_->data(), payload_->bytes());
      std::ranges::transform(bytes, bytes.begin(), [](std::byte byte) { return ~byte; });
    }
  }

  const Place place_;
  const std::shared_ptr<MemoryTier> host_ =
      std::make_shared<MemoryTier>(TierKind::kHost, kGiB, std::make_unique<MmapArena>());
  const std::shared_ptr<MemoryTier> device_ =
      std::make_shared<MemoryTier>(TierKind::kDevice, kGiB, std::make_unique<MmapArena>());
  const std::shared_ptr<MemoryTier> shared_;
  std::unique_ptr<Payload> payload_;
};

/// Host storage that all ranks share, as on a device that locks its pages.
std::unique_ptr<SharedHostStorage> share(Collectives& group, std::size_t bytes) {
  NodeHostStorage made =
      share_host_storage(group, group.size(), SharedHostStorage::size_of(bytes),
                         [](std::span<std::byte>) { return std::shared_ptr<void>(); });
  EXPECT_EQ(made.refusal, "");
  return std::move(made.storage);
}

constexpr std::array kPlaces = {Place::kResident, Place::kHost, Place::kDevice};
constexpr std::size_t kNumel = 3 * 16 * 700;

std::vector<float> of_rank(std::size_t rank) {
  std::vector<float> values(kNumel);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(rank * 1000 + i % 977);
  }
  return values;
}

TEST(DeviceStagingTest, GradientsAreTheMeanWhereverEachRankHasThem) {
  ThreadRanks threads(kPlaces.size());
  threads.run([](Collectives& group) {
    Rank own(kPlaces.at(group.rank()), kNumel * sizeof(float));
    own.set(of_rank(group.rank()));
    ThreadExecutor executor(1);
    RankFigures figures;
    RankReduction reduction(group, nullptr, executor, own.host().allocate(3 * 64 * 100, ""),
                            figures, own.staging());
    reduction.reduce(own.payload(), ScalarType::kFloat32);
    const std::vector<float> found = own.values();
    for (std::size_t i = 0; i < kNumel; ++i) {
      const auto element = static_cast<float>(i % 977);
      ASSERT_EQ(found[i], (element + (1000 + element) + (2000 + element)) / 3.0F) << i;
    }
    EXPECT_EQ(own.copies.num_copies(), kPlaces.at(group.rank()) == Place::kHost ? 0 : 2);
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(kPlaces.size()));
}

// Each rank's own gradients are in a copy, or on its device; the mean is in memory that all share.
TEST(DeviceStagingTest, GradientsInSharedHostStorageAreTheMeanWhereverEachRankHasThem) {
  constexpr std::array kShared = {Place::kResident, Place::kHost, Place::kResident};
  ThreadRanks threads(kShared.size());
  threads.run([&](Collectives& group) {
    const auto storage = share(group, kNumel * sizeof(float));
    Rank own(kShared.at(group.rank()), kNumel * sizeof(float), storage->make_arena());
    if (kShared.at(group.rank()) == Place::kHost) {
      own.payload().take_copy(Payload::CopyContents::kZeros);
    }
    own.set(of_rank(group.rank()));
    ThreadExecutor executor(1);
    RankFigures figures;
    RankReduction reduction(group, storage.get(), executor, own.host().allocate(3 * 64 * 100, ""),
                            figures, own.staging());
    const std::size_t used = own.host().ledger().used();
    reduction.reduce(own.payload(), ScalarType::kFloat32);
    EXPECT_FALSE(own.payload().has_copy());
    EXPECT_EQ(own.host().ledger().used(),
              used - (kShared.at(group.rank()) == Place::kHost ? kNumel * sizeof(float) : 0));
    const std::vector<float> found = own.values();
    std::vector<float> common(kNumel);
    std::memcpy(common.data(), own.payload().storage(), kNumel * sizeof(float));
    for (std::size_t i = 0; i < kNumel; ++i) {
      const auto element = static_cast<float>(i % 977);
      const float mean = (element + (1000 + element) + (2000 + element)) / 3.0F;
      ASSERT_EQ(found[i], mean) << i;
      ASSERT_EQ(common[i], mean) << i;
    }
    barrier(group);
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(kShared.size()));
}

// A rank with a copy of its own publishes the shard that it updates; resident weights are brought.
TEST(DeviceStagingTest, WeightsInSharedHostStorageAreEachRanksShardWhereverItHasThem) {
  constexpr std::array kShared = {Place::kResident, Place::kHost, Place::kResident};
  ThreadRanks threads(kShared.size());
  threads.run([&](Collectives& group) {
    const auto storage = share(group, kNumel * sizeof(float));
    Rank own(kShared.at(group.rank()), kNumel * sizeof(float), storage->make_arena());
    const bool on_host = kShared.at(group.rank()) == Place::kHost;
    if (on_host) {
      own.payload().take_copy(Payload::CopyContents::kStorage);
    }
    own.set(of_rank(group.rank()));
    RankWeights weights(std::shared_ptr<Collectives>(&group, [](Collectives*) {}), storage.get(),
                        own.staging());
    barrier(group);
    if (on_host) {
      weights.publish_copy(own.payload());
      own.payload().drop_copy();
      EXPECT_EQ(weights.begin_update(own.payload()), own.payload().storage());
    }
    const Payload* const payload = &own.payload();
    weights.gather(std::span(&payload, 1));
    const std::vector<float> found = own.values();
    for (std::size_t i = 0; i < kNumel; ++i) {
      const std::size_t rank = i / (kNumel / kShared.size());
      ASSERT_EQ(found[i], static_cast<float>(rank * 1000 + i % 977)) << i;
    }
    barrier(group);
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(kShared.size()));
}

TEST(DeviceStagingTest, WeightsAreEachRanksShardWhereverItHasThem) {
  ThreadRanks threads(kPlaces.size());
  threads.run([](Collectives& group) {
    Rank own(kPlaces.at(group.rank()), kNumel * sizeof(float));
    own.set(of_rank(group.rank()));
    RankWeights weights(std::shared_ptr<Collectives>(&group, [](Collectives*) {}), nullptr,
                        own.staging());
    const Payload* const payload = &own.payload();
    weights.gather(std::span(&payload, 1));
    const std::vector<float> found = own.values();
    for (std::size_t i = 0; i < kNumel; ++i) {
      const std::size_t rank = i / (kNumel / kPlaces.size());
      ASSERT_EQ(found[i], static_cast<float>(rank * 1000 + i % 977)) << i;
    }
    barrier(group);
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(kPlaces.size()));
}

}  // namespace
}  // namespace castor
