#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/chunk_manager.h"
#include "core/error.h"
#include "core/fakes.h"

namespace castor {
namespace {

using testing::chunk_id;
using testing::FakeUpdates;
using testing::InjectedFailure;
using testing::Net;
using testing::param_id;
using testing::Rig;

constexpr std::size_t kChunk = Net::kChunk;
constexpr std::size_t kNoCap = ~std::size_t{0};
const ChunkId kA = chunk_id(0);
const ChunkId kB = chunk_id(1);

/// What a tensor over a payload does: it goes where the payload goes.
class FakeFollower final : public PayloadFollower {
 public:
  explicit FakeFollower(std::shared_ptr<std::byte*> address) : address_(address) {}
  [[nodiscard]] bool alive() const noexcept override { return !address_.expired(); }
  void moved(std::byte* address) noexcept override {
    if (const auto kept = address_.lock()) {
      *kept = address;
    }
  }

 private:
  std::weak_ptr<std::byte*> address_;
};

/// Chunks with parameters, gradients and one moment: three times kChunk each on the device.
class ChunkPromotionTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kWhole = 3 * kChunk;

  void start(std::size_t chunks, std::size_t device_bytes, std::vector<Placement> placements = {}) {
    rig_.emplace(Net::row(chunks).layout(), device_bytes, std::move(placements));
    for (std::size_t i = 0; i < chunks; ++i) {
      for (const PayloadKind kind : {PayloadKind::kGrad, state_payload(0)}) {
        manager().add_payload(chunk_id(i), kind, kChunk);
        fill(chunk_id(i), kind, static_cast<int>(i) + 100);
      }
    }
  }
  void TearDown() override {
    if (rig_ && rig_->manager) {
      rig_->expect_consistent();
    }
  }
  ChunkManager& manager() { return *rig_->manager; }
  std::size_t used() { return rig_->device->ledger().used(); }
  const Payload& payload(ChunkId chunk, PayloadKind kind) {
    return *manager().payload(chunk, kind);
  }
  void fill(ChunkId chunk, PayloadKind kind, int value) {
    std::memset(payload(chunk, kind).data(), value, kChunk);
  }
  bool holds(ChunkId chunk, PayloadKind kind, int value) {
    const std::vector<std::byte> expected(kChunk, std::byte(value));
    return std::memcmp(payload(chunk, kind).data(), expected.data(), kChunk) == 0;
  }

  FakeUpdates updates_;  // outlives the manager
  std::optional<Rig> rig_;
};

TEST_F(ChunkPromotionTest, APromotedChunkHasAllItsPayloadsOnTheDevice) {
  start(2, kWhole);
  EXPECT_EQ(manager().on_device_bytes(kA), kWhole);
  ASSERT_TRUE(manager().try_promote(kA));
  EXPECT_TRUE(manager().promoted(kA));
  EXPECT_EQ(manager().placement(kA), Placement::kDevice);
  EXPECT_TRUE(manager().resident(kA));
  EXPECT_EQ(manager().state(param_id(0)), TensorState::kHold);
  EXPECT_EQ(used(), kWhole);
  EXPECT_EQ(manager().resident_bytes(), kWhole);
  EXPECT_EQ(manager().counts().h2d_bytes, kWhole);
  EXPECT_EQ(manager().counts().promotions, 1u);
  for (const PayloadKind kind : {PayloadKind::kParam, PayloadKind::kGrad, state_payload(0)}) {
    EXPECT_EQ(payload(kA, kind).tier(), TierKind::kDevice);
    EXPECT_EQ(payload(kB, kind).tier(), TierKind::kHost);
  }
  EXPECT_TRUE(rig_->binder.reads(param_id(0), Rig::initial(0)));
  EXPECT_EQ(rig_->binder.address(kA), payload(kA, PayloadKind::kParam).data());
  EXPECT_TRUE(holds(kA, PayloadKind::kGrad, 100));
  EXPECT_TRUE(holds(kA, state_payload(0), 100));
}

TEST_F(ChunkPromotionTest, TheWayBackStaysPaidFor) {
  start(1, kWhole);
  const std::size_t before = rig_->host->ledger().used();
  ASSERT_TRUE(manager().try_promote(kA));
  EXPECT_EQ(rig_->host->ledger().used(), before);
}

TEST_F(ChunkPromotionTest, WithoutRoomForAllOfItNothingMoves) {
  start(1, kWhole - 1);
  EXPECT_FALSE(manager().try_promote(kA));
  EXPECT_FALSE(manager().promoted(kA));
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(manager().counts().h2d_bytes, 0u);
  EXPECT_TRUE(rig_->bound_to_host(kA));
}

TEST_F(ChunkPromotionTest, ADemotedChunkIsAStreamedOneThatIsResident) {
  start(2, kWhole);
  ASSERT_TRUE(manager().try_promote(kA));
  rig_->binder.write(param_id(0), 77);
  fill(kA, PayloadKind::kGrad, 78);
  const std::byte* address = rig_->binder.address(kA);
  manager().demote(kA);
  EXPECT_FALSE(manager().promoted(kA));
  EXPECT_EQ(manager().placement(kA), Placement::kStream);
  EXPECT_TRUE(manager().resident(kA));
  EXPECT_EQ(rig_->binder.address(kA), address) << "an operator under way may be reading it";
  EXPECT_EQ(used(), kChunk);
  EXPECT_EQ(manager().slot_bytes(), kChunk);
  EXPECT_EQ(manager().resident_bytes(), 0u);
  EXPECT_EQ(manager().counts().d2h_bytes, kWhole);
  EXPECT_EQ(manager().counts().demotions, 1u);
  EXPECT_TRUE(holds(kA, PayloadKind::kGrad, 78));
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 77));
  manager().evict(kA);
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(manager().counts().d2h_bytes, kWhole) << "its host storage was up to date";
  EXPECT_TRUE(rig_->binder.reads(param_id(0), 77));
}

TEST_F(ChunkPromotionTest, WhatIsWrittenAfterTheDemotionGoesToTheHostAsWell) {
  start(1, kWhole);
  ASSERT_TRUE(manager().try_promote(kA));
  manager().demote(kA);
  rig_->binder.write(param_id(0), 55);
  manager().evict(kA);
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 55));
}

TEST_F(ChunkPromotionTest, APinnedChunkInUseMayBeDemotedAndStaysPinned) {
  start(1, kWhole);
  ASSERT_TRUE(manager().try_promote(kA));
  Pin pin = manager().pin(kA);
  manager().set_state(param_id(0), TensorState::kCompute);
  EXPECT_EQ(manager().pinned_bytes(), 0u) << "it takes no slot";
  manager().demote(kA);
  EXPECT_EQ(manager().pinned_bytes(), kChunk);
  EXPECT_EQ(manager().state(param_id(0)), TensorState::kCompute);
  EXPECT_FALSE(manager().make_room(kWhole, kNoCap)) << "it is in use";
  manager().set_state(param_id(0), TensorState::kHold);
  pin.release();
  EXPECT_EQ(manager().pinned_bytes(), 0u);
  EXPECT_TRUE(manager().make_room(kWhole, kNoCap));
}

TEST_F(ChunkPromotionTest, DemotionPrefersTheChunkNeededLastAndSparesPinnedOnes) {
  start(3, 3 * kWhole);
  for (std::size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(manager().try_promote(chunk_id(i)));
    manager().set_next_use(chunk_id(i), 10 + i);
  }
  const Pin pin = manager().pin(chunk_id(2));
  EXPECT_TRUE(manager().demote_one());
  EXPECT_FALSE(manager().promoted(chunk_id(1)));
  EXPECT_TRUE(manager().demote_one());
  EXPECT_FALSE(manager().promoted(chunk_id(0)));
  EXPECT_TRUE(manager().promoted(chunk_id(2)));
  EXPECT_TRUE(manager().demote_one());
  EXPECT_FALSE(manager().demote_one());
}

TEST_F(ChunkPromotionTest, DemotionWaitsForTheUpdate) {
  start(1, kWhole);
  manager().follow(&updates_);
  ASSERT_TRUE(manager().try_promote(kA));
  updates_.submit(kA, [&] { fill(kA, state_payload(0), 9); });
  manager().demote(kA);
  EXPECT_TRUE(holds(kA, state_payload(0), 9));
}

TEST_F(ChunkPromotionTest, DemotionAwaitsUsersBehindTheUpdateAndBeforeTheCopy) {
  start(1, kWhole);
  manager().follow(&updates_);
  std::vector<ChunkId> awaited;
  manager().await_before_demotion([&](ChunkId chunk) {
    awaited.push_back(chunk);
    EXPECT_TRUE(manager().promoted(chunk));
    EXPECT_FALSE(updates_.pending(chunk));
    EXPECT_EQ(payload(chunk, PayloadKind::kGrad).tier(), TierKind::kDevice);
    EXPECT_EQ(manager().counts().d2h_bytes, 0u);
    fill(chunk, PayloadKind::kGrad, 7);  // another thread's reduction ends
  });
  ASSERT_TRUE(manager().try_promote(kA));
  EXPECT_TRUE(awaited.empty()) << "nobody uses a chunk on the device before it is there";
  updates_.submit(kA, [&] { fill(kA, state_payload(0), 9); });
  manager().demote(kA);
  EXPECT_EQ(awaited, std::vector{kA});
  EXPECT_EQ(payload(kA, PayloadKind::kGrad).tier(), TierKind::kHost);
  EXPECT_TRUE(holds(kA, PayloadKind::kGrad, 7));
  EXPECT_TRUE(holds(kA, state_payload(0), 9));
}

TEST_F(ChunkPromotionTest, ADemotionThatIsRefusedAwaitsNobody) {
  start(2, kWhole);
  int awaited = 0;
  manager().await_before_demotion([&](ChunkId) { ++awaited; });
  EXPECT_THROW(manager().demote(kA), UsageError) << "it is not promoted";
  ASSERT_TRUE(manager().try_promote(kA));
  {
    const Pin pin = manager().pin_for_operator(kA, StreamId{});
    EXPECT_THROW(manager().demote(kA), UsageError) << "an operator pins it";
  }
  EXPECT_EQ(awaited, 0);
  manager().demote(kA);
  EXPECT_EQ(awaited, 1);
}

TEST_F(ChunkPromotionTest, AnErrorOfTheUsersLeavesTheChunkOnTheDevice) {
  start(1, kWhole);
  ASSERT_TRUE(manager().try_promote(kA));
  manager().await_before_demotion([](ChunkId) { throw Error("another rank has ended"); });
  EXPECT_THROW(manager().demote(kA), Error);
  EXPECT_TRUE(manager().promoted(kA));
  EXPECT_EQ(used(), kWhole);
  EXPECT_EQ(manager().counts().d2h_bytes, 0u);
  EXPECT_EQ(manager().counts().demotions, 0u);
  EXPECT_TRUE(holds(kA, PayloadKind::kGrad, 100));
  manager().await_before_demotion(nullptr);
  manager().demote(kA);
  EXPECT_FALSE(manager().promoted(kA));
  EXPECT_TRUE(holds(kA, PayloadKind::kGrad, 100));
}

TEST_F(ChunkPromotionTest, WhoMakesRoomAwaitsTheUsersOfTheChunkThatGoes) {
  start(2, 2 * kWhole);
  std::vector<ChunkId> awaited;
  manager().await_before_demotion([&](ChunkId chunk) { awaited.push_back(chunk); });
  ASSERT_TRUE(manager().try_promote(kA));
  ASSERT_TRUE(manager().try_promote(kB));
  const Pin pin = manager().pin(kA);
  ASSERT_TRUE(manager().demote_one());
  EXPECT_EQ(awaited, std::vector{kB});
}

TEST_F(ChunkPromotionTest, OnlyAStreamedChunkOnTheHostIsPromoted) {
  start(4, 4 * kWhole, {Placement::kStream, Placement::kKeep, Placement::kDevice});
  manager().fetch(kA);
  EXPECT_THROW((void)manager().try_promote(kA), UsageError);
  EXPECT_THROW((void)manager().try_promote(chunk_id(1)), UsageError);
  EXPECT_THROW((void)manager().try_promote(chunk_id(2)), UsageError);
  manager().follow(&updates_);
  updates_.submit(chunk_id(3), [] {});
  EXPECT_THROW((void)manager().try_promote(chunk_id(3)), UsageError);
  updates_.wait(chunk_id(3));
  ASSERT_TRUE(manager().try_promote(chunk_id(3)));
  EXPECT_THROW((void)manager().try_promote(chunk_id(3)), UsageError);
  EXPECT_THROW(manager().demote(kA), UsageError);
  EXPECT_THROW(manager().demote(chunk_id(2)), UsageError) << "it lives there by the user's word";
  EXPECT_THROW(manager().evict(chunk_id(3)), UsageError);
}

TEST_F(ChunkPromotionTest, AFailedCopyLeavesTheChunkWhereItWas) {
  for (std::size_t call = 1; call <= 3; ++call) {
    for (const bool submit : {true, false}) {
      start(1, kWhole);
      const auto fail = [&] {
        submit ? rig_->engine.fail_submit(call) : rig_->engine.fail_wait(call);
      };
      fail();
      EXPECT_THROW((void)manager().try_promote(kA), InjectedFailure);
      EXPECT_EQ(rig_->engine.num_pending(), 0u) << "no copy outlives its target";
      EXPECT_FALSE(manager().promoted(kA));
      EXPECT_EQ(used(), 0u);
      rig_->engine.never_fail();
      ASSERT_TRUE(manager().try_promote(kA));
      rig_->binder.write(param_id(0), 66);
      fail();
      EXPECT_THROW(manager().demote(kA), InjectedFailure);
      EXPECT_EQ(rig_->engine.num_pending(), 0u);
      EXPECT_TRUE(manager().promoted(kA));
      EXPECT_TRUE(rig_->binder.reads(param_id(0), 66));
      rig_->engine.never_fail();
      rig_->expect_consistent();
      manager().demote(kA);
      EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 66));
    }
  }
}

TEST_F(ChunkPromotionTest, WritesInTheMiddleOfAStepAreComparedWithWhatWasThere) {
  rig_.emplace(Net::row(1).layout(), 3 * kChunk);
  manager().add_payload(kA, state_payload(1), kChunk);
  manager().follow_writes(kA);
  EXPECT_EQ(manager().on_device_bytes(kA), 3 * kChunk) << "with a copy of the parameters";
  ASSERT_TRUE(manager().try_promote(kA));
  EXPECT_EQ(used(), 3 * kChunk);
  rig_->binder.write(param_id(0), 10);  // between steps: not told apart on the host either
  { const Pin pin = manager().pin(kA); }
  manager().move_to_host();
  EXPECT_TRUE(rig_->binder.write_backs().empty());
  { const Pin pin = manager().pin(kA); }
  rig_->binder.write(param_id(0), 11);
  { const Pin pin = manager().pin(kA); }
  manager().settle_writes(kA);
  ASSERT_EQ(rig_->binder.write_backs().size(), 1u);
  EXPECT_EQ(rig_->binder.write_backs()[0].host, std::byte{10});
  EXPECT_EQ(rig_->binder.write_backs()[0].slot, std::byte{11});
  manager().move_to_host();
  EXPECT_EQ(rig_->binder.write_backs().size(), 1u) << "once";
  { const Pin pin = manager().pin(kA); }
  rig_->binder.write(param_id(0), 12);
  manager().demote(kA);
  EXPECT_EQ(rig_->binder.write_backs().size(), 2u);
  rig_->binder.write(param_id(0), 13);
  manager().evict(kA);
  ASSERT_EQ(rig_->binder.write_backs().size(), 3u);
  EXPECT_EQ(rig_->binder.write_backs()[2].host, std::byte{12});
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 13));
}

TEST_F(ChunkPromotionTest, FollowersGoWhereThePayloadGoes) {
  start(1, kWhole);
  const auto& grad = manager().payload(kA, PayloadKind::kGrad);
  std::byte* const host = grad->data();
  auto kept = std::make_shared<std::byte*>(host);
  auto dropped = std::make_shared<std::byte*>(host);
  grad->add_follower(std::make_unique<FakeFollower>(kept));
  grad->add_follower(std::make_unique<FakeFollower>(dropped));
  dropped.reset();
  ASSERT_TRUE(manager().try_promote(kA));
  EXPECT_NE(*kept, host);
  EXPECT_EQ(*kept, grad->data());
  EXPECT_EQ(grad->host_storage(), host);
  manager().demote(kA);
  EXPECT_EQ(*kept, host);
}

TEST_F(ChunkPromotionTest, PromotedChunksOutliveTheManagerWhereTheyAre) {
  start(1, kWhole);
  ASSERT_TRUE(manager().try_promote(kA));
  rig_->binder.write(param_id(0), 33);
  const std::byte* address = rig_->binder.address(kA);
  rig_->manager.reset();
  EXPECT_EQ(rig_->host_payloads[0]->data(), address)
      << "whoever knows the address may go on using it";
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 33));
  EXPECT_EQ(used(), kChunk) << "what the payloads that are left take";
  rig_->host_payloads.clear();
  EXPECT_EQ(used(), 0u);
}

}  // namespace
}  // namespace castor
