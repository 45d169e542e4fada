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
  Rank(Place place, std::size_t bytes)
      : place_(place),
        payload_(std::make_unique<Payload>(place == Place::kDevice ? device_ : host_, bytes, "")) {
    if (place == Place::kResident) {
      payload_->move_to(device_, device_->allocate(bytes, ""));
    }
  }

  [[nodiscard]] DeviceStaging staging() {
    return {std::shared_ptr<CopyEngine>(std::shared_ptr<void>(), &copies), *device_,
            place_ == Place::kDevice ? host_->allocate(payload_->bytes(), "") : Block()};
  }
  [[nodiscard]] const Payload& payload() const { return *payload_; }
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
  std::unique_ptr<Payload> payload_;
};

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
    meet(group);
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(kPlaces.size()));
}

}  // namespace
}  // namespace castor
