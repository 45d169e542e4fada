#include "core/chunk_manager.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"

namespace castor {
namespace {

using testing::chunk_id;
using testing::FailingArena;
using testing::HeapArena;
using testing::InjectedFailure;
using testing::LiveBlocks;
using testing::Net;
using testing::param_id;
using testing::Rig;

static_assert(!std::is_copy_constructible_v<Pin> && !std::is_copy_assignable_v<Pin>);
static_assert(std::is_nothrow_move_constructible_v<Pin>);

constexpr std::size_t kChunk = Net::kChunk;
constexpr std::size_t kNoCap = ~std::size_t{0};
const ChunkId kA = chunk_id(0);
const ChunkId kB = chunk_id(1);
const ChunkId kC = chunk_id(2);

/// `chunks` chunks of one parameter each, over a device with room for `slots` of them.
class ChunkManagerTest : public ::testing::Test {
 protected:
  void start(std::size_t chunks, std::size_t slots, std::vector<Placement> placements = {}) {
    rig_.emplace(Net::row(chunks).layout(), slots * kChunk, std::move(placements));
  }
  void TearDown() override {
    if (rig_ && rig_->manager) {
      rig_->expect_consistent();
    }
  }
  ChunkManager& manager() { return *rig_->manager; }
  std::size_t used() { return rig_->device->ledger().used(); }

  std::optional<Rig> rig_;
};

TEST_F(ChunkManagerTest, StartsWithEverythingOnTheHost) {
  start(3, 1);
  EXPECT_EQ(manager().slot_bytes(), 0u);
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(rig_->host->ledger().used(), 3 * kChunk);
  EXPECT_FALSE(manager().resident(kA));
  EXPECT_EQ(manager().state(param_id(0)), TensorState::kFree);
}

TEST_F(ChunkManagerTest, PinnedChunkIsBoundToItsSlotAndReadsTheSame) {
  start(2, 1);
  manager().fetch(kA);
  EXPECT_TRUE(rig_->bound_to_host(kA)) << "readable on the host until the copy is waited for";
  EXPECT_EQ(rig_->engine.num_pending(), 1u);
  const Pin pin = manager().pin(kA);
  EXPECT_EQ(rig_->engine.num_pending(), 0u);
  EXPECT_FALSE(rig_->bound_to_host(kA));
  EXPECT_TRUE(rig_->binder.reads(param_id(0), Rig::initial(0)));
  EXPECT_EQ(manager().slot_bytes(), kChunk);
  EXPECT_EQ(manager().pinned_bytes(), kChunk);
  EXPECT_EQ(manager().state(param_id(0)), TensorState::kHold);
  EXPECT_EQ(manager().counts().h2d_bytes, kChunk);
}

TEST_F(ChunkManagerTest, FetchOfAResidentChunkDoesNothing) {
  start(1, 1);
  manager().fetch(kA);
  manager().fetch(kA);
  EXPECT_EQ(manager().counts().fetches, 1u);
  EXPECT_EQ(used(), kChunk);
}

TEST_F(ChunkManagerTest, PinBeforeFetchIsRefused) {
  start(1, 1);
  EXPECT_THROW((void)manager().pin(kA), UsageError);
  EXPECT_EQ(manager().pins(kA), 0u);
}

TEST_F(ChunkManagerTest, PinnedChunkIsNeverEvicted) {
  start(2, 2);
  manager().fetch(kA);
  manager().fetch(kB);
  Pin pin = manager().pin(kA);
  EXPECT_THROW(manager().evict(kA), UsageError);
  EXPECT_THROW(manager().move_to_host(), UsageError);
  EXPECT_TRUE(manager().resident(kA));
  EXPECT_TRUE(manager().make_room(kChunk, kNoCap));
  EXPECT_TRUE(manager().resident(kA)) << "the other one left";
  EXPECT_FALSE(manager().resident(kB));
  pin.release();
  manager().evict(kA);
  EXPECT_EQ(used(), 0u);
}

TEST_F(ChunkManagerTest, PinsNestAndMove) {
  start(1, 1);
  manager().fetch(kA);
  Pin first = manager().pin(kA);
  {
    const Pin second = manager().pin(kA);
    EXPECT_EQ(manager().pins(kA), 2u);
    EXPECT_EQ(manager().pinned_bytes(), kChunk) << "counted once";
  }
  EXPECT_EQ(manager().pins(kA), 1u);
  Pin moved = std::move(first);
  first.release();  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(manager().pins(kA), 1u);
  moved = Pin();
  EXPECT_EQ(manager().pins(kA), 0u);
  EXPECT_EQ(manager().pinned_bytes(), 0u);
}

TEST_F(ChunkManagerTest, EverythingPinnedLeavesNoRoom) {
  start(3, 2);
  manager().fetch(kA);
  manager().fetch(kB);
  const Pin a = manager().pin(kA);
  const Pin b = manager().pin(kB);
  EXPECT_FALSE(manager().make_room(1, kNoCap));
  EXPECT_EQ(manager().counts().evictions, 0u);
  EXPECT_TRUE(manager().make_room(0, 0)) << "nothing always fits: the cap is a wish";
}

TEST_F(ChunkManagerTest, FetchWithoutRoomThrowsAndLeavesTheAccountsExact) {
  start(2, 1);
  manager().fetch(kA);
  try {
    manager().fetch(kB);
    FAIL() << "no throw";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.requested(), kChunk);
    EXPECT_EQ(error.available(), 0u);
  }
  EXPECT_FALSE(manager().resident(kB));
  EXPECT_EQ(manager().slot_bytes(), kChunk);
  EXPECT_EQ(used(), kChunk);
  EXPECT_EQ(manager().counts().fetches, 1u);
  EXPECT_EQ(manager().counts().h2d_bytes, kChunk);
  rig_->expect_consistent();
  manager().evict(kA);
  manager().fetch(kB);
  EXPECT_TRUE(manager().resident(kB));
}

TEST_F(ChunkManagerTest, MakeRoomEvictsNoMoreThanItMust) {
  start(4, 3);
  for (const std::size_t i : {0, 1, 2}) {
    manager().set_next_use(chunk_id(i), 10 + i);
    manager().fetch(chunk_id(i));
  }
  EXPECT_TRUE(manager().make_room(kChunk, kNoCap));
  EXPECT_EQ(used(), 2 * kChunk);
  EXPECT_FALSE(manager().resident(kC)) << "the furthest next use";
  EXPECT_TRUE(manager().make_room(kChunk, kNoCap)) << "exact fit";
  EXPECT_EQ(manager().counts().evictions, 1u);
  EXPECT_TRUE(manager().make_room(0, kChunk));
  EXPECT_EQ(used(), kChunk) << "down to the cap";
  EXPECT_TRUE(manager().resident(kA));
}

TEST_F(ChunkManagerTest, MakeRoomSparesWhatIsUsedBeforeTheHorizon) {
  start(3, 2);
  manager().set_next_use(kA, 4);
  manager().set_next_use(kB, 6);
  manager().fetch(kA);
  manager().fetch(kB);
  EXPECT_FALSE(manager().make_room(kChunk, kNoCap, 7));
  EXPECT_TRUE(manager().make_room(kChunk, kNoCap, 5));
  EXPECT_TRUE(manager().resident(kA));
  EXPECT_FALSE(manager().make_room(2 * kChunk, kNoCap, 5));
}

TEST_F(ChunkManagerTest, NextUseOfAPinnedChunkCountsOnceItIsUnpinned) {
  start(3, 2);
  manager().set_next_use(kA, 5);
  manager().set_next_use(kB, 6);
  manager().fetch(kA);
  manager().fetch(kB);
  Pin a = manager().pin(kA);
  manager().set_next_use(kA, 100);
  EXPECT_TRUE(manager().resident(kA));
  a.release();
  EXPECT_TRUE(manager().make_room(kChunk, kNoCap));
  EXPECT_FALSE(manager().resident(kA));
  EXPECT_TRUE(manager().resident(kB));
}

TEST_F(ChunkManagerTest, UserWriteOnTheDeviceIsCopiedBack) {
  start(1, 1);
  manager().fetch(kA);
  { const Pin pin = manager().pin(kA); }
  rig_->binder.write(param_id(0), 77);
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), Rig::initial(0))) << "not yet";
  manager().evict(kA);
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 77));
  EXPECT_TRUE(rig_->binder.reads(param_id(0), 77));
  EXPECT_EQ(manager().counts().d2h_bytes, kChunk);
  manager().fetch(kA);
  const Pin again = manager().pin(kA);
  EXPECT_TRUE(rig_->binder.reads(param_id(0), 77));
}

TEST_F(ChunkManagerTest, BinderSeesHostStorageAndSlotBeforeTheOneOverwritesTheOther) {
  start(1, 1);
  manager().fetch(kA);
  { const Pin pin = manager().pin(kA); }
  manager().evict(kA);
  EXPECT_TRUE(rig_->binder.write_backs().empty()) << "nothing was written";
  manager().fetch(kA);
  { const Pin pin = manager().pin(kA); }
  rig_->binder.write(param_id(0), 77);
  manager().evict(kA);
  ASSERT_EQ(rig_->binder.write_backs().size(), 1u);
  EXPECT_EQ(rig_->binder.write_backs()[0].chunk, kA);
  EXPECT_EQ(rig_->binder.write_backs()[0].host, std::byte{Rig::initial(0)});
  EXPECT_EQ(rig_->binder.write_backs()[0].slot, std::byte{77});
}

TEST_F(ChunkManagerTest, CleanChunkCostsNothingToDrop) {
  start(1, 1);
  manager().fetch(kA);
  { const Pin pin = manager().pin(kA); }
  manager().evict(kA);
  EXPECT_EQ(manager().counts().d2h_bytes, 0u);
  EXPECT_EQ(manager().counts().evictions, 1u);
  EXPECT_TRUE(rig_->bound_to_host(kA));
}

TEST_F(ChunkManagerTest, WriteToHostStorageBetweenFetchAndPinIsNotLost) {
  start(1, 1);
  manager().fetch(kA);
  rig_->engine.wait(CopyTicket{1});  // the copy is over before the write: the slot is stale
  rig_->binder.write(param_id(0), 55);
  const Pin pin = manager().pin(kA);
  EXPECT_TRUE(rig_->binder.reads(param_id(0), 55));
  EXPECT_FALSE(rig_->bound_to_host(kA));
  EXPECT_EQ(manager().counts().h2d_bytes, 2 * kChunk);
}

TEST_F(ChunkManagerTest, WriteToHostStorageOfAChunkThatLeavesUnpinnedIsNotLost) {
  start(1, 1);
  manager().fetch(kA);
  rig_->binder.write(param_id(0), 55);
  manager().evict(kA);
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 55));
  EXPECT_EQ(manager().counts().d2h_bytes, 0u)
      << "the slot knows nothing that host storage does not";
}

TEST_F(ChunkManagerTest, WriteSurvivesTheRestOfItsChunk) {
  Net net;
  net.add({16, 16, 16});
  rig_.emplace(net.layout(), kChunk);
  ASSERT_EQ(rig_->layout.chunks().size(), 1u);
  ASSERT_EQ(rig_->layout.chunk(kA).used_bytes, 192u);
  manager().fetch(kA);
  { const Pin pin = manager().pin(kA); }
  rig_->binder.write(param_id(1), 99);
  manager().evict(kA);
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), Rig::initial(0)));
  EXPECT_TRUE(rig_->host_storage_holds(param_id(1), 99));
  EXPECT_TRUE(rig_->host_storage_holds(param_id(2), Rig::initial(2)));
}

TEST_F(ChunkManagerTest, SlotTakesTheCapacityAndCopiesMoveWhatIsUsed) {
  Net net;
  net.add({48, Net::kWhole});  // 192 bytes of the first chunk's 256
  rig_.emplace(net.layout(), 2 * kChunk);
  manager().fetch(kA);
  EXPECT_EQ(manager().slot_bytes(), 256u);
  EXPECT_EQ(manager().counts().h2d_bytes, 192u);
}

TEST_F(ChunkManagerTest, ChunkOfEmptyParametersComesAndGoes) {
  Net net;
  net.add({0});
  rig_.emplace(net.layout(), kChunk);
  manager().fetch(kA);
  { const Pin pin = manager().pin(kA); }
  manager().evict(kA);
  EXPECT_EQ(used(), 0u);
}

TEST_F(ChunkManagerTest, KeptChunkStaysUntilItMovesToTheHost) {
  start(3, 2, {Placement::kKeep});
  manager().fetch(kA);
  manager().fetch(kB);
  EXPECT_TRUE(manager().make_room(kChunk, kNoCap));
  EXPECT_FALSE(manager().make_room(2 * kChunk, kNoCap));
  EXPECT_TRUE(manager().resident(kA));
  { const Pin pin = manager().pin(kA); }
  EXPECT_FALSE(manager().make_room(2 * kChunk, kNoCap)) << "unpinning changes nothing";
  rig_->binder.write(param_id(0), 42);
  manager().move_to_host();
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 42));
  EXPECT_EQ(used(), 0u);
}

TEST_F(ChunkManagerTest, DeviceChunkLivesThereAndTakesNoSlot) {
  start(2, 2, {Placement::kDevice});
  EXPECT_EQ(used(), kChunk);
  EXPECT_TRUE(manager().resident(kA));
  EXPECT_EQ(manager().state(param_id(0)), TensorState::kHold);
  manager().fetch(kA);
  {
    const Pin pin = manager().pin(kA);
    EXPECT_EQ(manager().pinned_bytes(), 0u);
  }
  EXPECT_EQ(manager().slot_bytes(), 0u);
  EXPECT_EQ(manager().counts().h2d_bytes, 0u);
  EXPECT_THROW(manager().evict(kA), UsageError);
  EXPECT_FALSE(manager().make_room(2 * kChunk, kNoCap));
  manager().move_to_host();
  EXPECT_TRUE(manager().resident(kA));
}

TEST_F(ChunkManagerTest, EvictingWhatIsNotThereIsRefused) {
  start(1, 1);
  EXPECT_THROW(manager().evict(kA), UsageError);
  EXPECT_EQ(manager().counts().evictions, 0u);
}

TEST_F(ChunkManagerTest, MoveToHostIsIdempotentAndNotCountedAsEviction) {
  start(2, 2);
  manager().fetch(kA);
  manager().fetch(kB);
  { const Pin pin = manager().pin(kB); }
  rig_->binder.write(param_id(1), 9);
  manager().move_to_host();
  manager().move_to_host();
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(manager().counts().evictions, 0u);
  EXPECT_EQ(manager().counts().d2h_bytes, kChunk);
  EXPECT_TRUE(rig_->host_storage_holds(param_id(1), 9));
}

TEST_F(ChunkManagerTest, GradientStateOutlivesResidency) {
  start(1, 1);
  manager().fetch(kA);
  manager().set_state(param_id(0), TensorState::kReadyForReduce);
  manager().evict(kA);
  EXPECT_EQ(manager().state(param_id(0)), TensorState::kReadyForReduce);
  manager().fetch(kA);
  EXPECT_EQ(manager().state(param_id(0)), TensorState::kReadyForReduce);
}

TEST_F(ChunkManagerTest, IllegalTransitionThrowsAndNamesTheParameter) {
  start(1, 1);
  try {
    manager().set_state(param_id(0), TensorState::kCompute);
    FAIL() << "no throw";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "parameter 'p0' cannot go from FREE to COMPUTE");
  }
  EXPECT_EQ(manager().state(param_id(0)), TensorState::kFree);
  EXPECT_NO_THROW(manager().set_state(param_id(0), TensorState::kFree));
}

TEST_F(ChunkManagerTest, ChunkInUseCannotLeaveAndNothingChanges) {
  start(1, 1);
  manager().fetch(kA);
  { const Pin pin = manager().pin(kA); }
  manager().set_state(param_id(0), TensorState::kCompute);
  EXPECT_THROW(manager().evict(kA), UsageError);
  EXPECT_TRUE(manager().resident(kA));
  EXPECT_FALSE(rig_->bound_to_host(kA));
  EXPECT_EQ(manager().counts().evictions, 0u);
  manager().set_state(param_id(0), TensorState::kHold);
  manager().evict(kA);
}

TEST_F(ChunkManagerTest, PayloadsLiveInTheChunksHostStorage) {
  start(2, 3, {Placement::kDevice});
  manager().add_payload(kA, PayloadKind::kGrad, 128);
  manager().add_payload(kB, state_payload(0), 512);
  EXPECT_EQ(manager().payload(kA, PayloadKind::kGrad)->tier(), TierKind::kDevice);
  EXPECT_EQ(manager().payload(kB, state_payload(0))->tier(), TierKind::kHost);
  EXPECT_EQ(manager().payload(kB, PayloadKind::kGrad), nullptr);
  EXPECT_EQ(used(), kChunk + 128);
  EXPECT_EQ(rig_->host->ledger().used(), kChunk + 512);
  EXPECT_THROW(manager().add_payload(kB, state_payload(0), 512), UsageError);
  EXPECT_THROW(manager().add_payload(kA, state_payload(0), 2 * kChunk), OutOfMemory);
  EXPECT_EQ(manager().payload(kA, state_payload(0)), nullptr);
  EXPECT_EQ(used(), kChunk + 128);
  // Not for expect_consistent, which knows of parameters only.
  rig_->manager.reset();
}

TEST_F(ChunkManagerTest, RejectsPlacementsForAnotherModel) {
  start(2, 1);
  EXPECT_THROW(ChunkManager(rig_->layout, {Placement::kStream}, rig_->device, rig_->host,
                            rig_->engine, rig_->binder),
               InvalidArgument);
}

TEST_F(ChunkManagerTest, ConstructorGivesBackWhatItTookWhenHostStorageIsRefused) {
  start(3, 1);
  const auto live = std::make_shared<LiveBlocks>();
  const auto host = std::make_shared<MemoryTier>(TierKind::kHost, 10 * kChunk,
                                                 std::make_unique<FailingArena>(live, 3));
  EXPECT_THROW(ChunkManager(rig_->layout, std::vector<Placement>(3, Placement::kStream),
                            rig_->device, host, rig_->engine, rig_->binder),
               OutOfMemory);
  EXPECT_EQ(host->ledger().used(), 0u);
  EXPECT_EQ(live->count(), 0u);
}

TEST_F(ChunkManagerTest, DeviceArenaThatRefusesLeavesTheChunkOnTheHost) {
  start(2, 1);
  const auto live = std::make_shared<LiveBlocks>();
  const auto device = std::make_shared<MemoryTier>(TierKind::kDevice, 10 * kChunk,
                                                   std::make_unique<FailingArena>(live, 2));
  ChunkManager other(rig_->layout, std::vector<Placement>(2, Placement::kStream), device,
                     rig_->host, rig_->engine, rig_->binder);
  other.fetch(kA);
  EXPECT_THROW(other.fetch(kB), OutOfMemory);
  EXPECT_FALSE(other.resident(kB));
  EXPECT_EQ(device->ledger().used(), kChunk);
  other.fetch(kB);
  EXPECT_EQ(device->ledger().used(), 2 * kChunk);
}

TEST_F(ChunkManagerTest, DestructorBindsEveryParameterToTheHostAndSavesUserWrites) {
  start(3, 3);
  manager().fetch(kA);
  manager().fetch(kB);
  manager().fetch(kC);  // its copy is still under way
  { const Pin a = manager().pin(kA); }
  { const Pin b = manager().pin(kB); }
  rig_->binder.write(param_id(0), 200);
  rig_->binder.write(param_id(2), 201);
  rig_->manager.reset();
  EXPECT_EQ(rig_->engine.num_pending(), 0u) << "no copy may outlive its slot";
  EXPECT_EQ(rig_->device_blocks->count(), 0u);
  EXPECT_EQ(used(), 0u);
  for (const ChunkId chunk : {kA, kB, kC}) {
    EXPECT_TRUE(rig_->bound_to_host(chunk));
  }
  EXPECT_TRUE(rig_->binder.reads(param_id(0), 200));
  EXPECT_TRUE(rig_->binder.reads(param_id(1), Rig::initial(1)));
  EXPECT_TRUE(rig_->binder.reads(param_id(2), 201));
}

TEST_F(ChunkManagerTest, DestructorThatCannotCopyBackStillBindsToTheHost) {
  start(1, 1);
  manager().fetch(kA);
  { const Pin pin = manager().pin(kA); }
  rig_->binder.write(param_id(0), 200);
  rig_->engine.fail_submit(1);
  rig_->manager.reset();
  EXPECT_TRUE(rig_->bound_to_host(kA));
  EXPECT_EQ(used(), 0u);
}

TEST_F(ChunkManagerTest, RefusedCopyInLeavesTheChunkOnTheHost) {
  start(1, 1);
  rig_->engine.fail_submit(1);
  EXPECT_THROW(manager().fetch(kA), InjectedFailure);
  EXPECT_FALSE(manager().resident(kA));
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(manager().counts().h2d_bytes, 0u);
  EXPECT_EQ(manager().counts().fetches, 0u);
  manager().fetch(kA);
  const Pin pin = manager().pin(kA);
  EXPECT_TRUE(rig_->binder.reads(param_id(0), Rig::initial(0)));
}

TEST_F(ChunkManagerTest, HalfACopyIsNeverBound) {
  start(1, 1);
  manager().fetch(kA);
  rig_->engine.fail_wait(1);
  EXPECT_THROW((void)manager().pin(kA), InjectedFailure);
  EXPECT_FALSE(manager().resident(kA));
  EXPECT_TRUE(rig_->bound_to_host(kA));
  EXPECT_EQ(used(), 0u);
  EXPECT_THROW((void)manager().pin(kA), UsageError);
  manager().fetch(kA);
  const Pin pin = manager().pin(kA);
  EXPECT_TRUE(rig_->binder.reads(param_id(0), Rig::initial(0)));
}

TEST_F(ChunkManagerTest, WriteBetweenFetchAndPinSurvivesARefusedSecondCopy) {
  for (const bool refuse_submit : {true, false}) {
    start(1, 1);
    manager().fetch(kA);
    rig_->binder.write(param_id(0), 66);
    if (refuse_submit) {
      rig_->engine.fail_submit(1);
    } else {
      rig_->engine.fail_wait(2);
    }
    EXPECT_THROW((void)manager().pin(kA), InjectedFailure);
    rig_->expect_consistent();
    EXPECT_TRUE(rig_->binder.reads(param_id(0), 66));
    manager().fetch(kA);
    const Pin pin = manager().pin(kA);
    EXPECT_TRUE(rig_->binder.reads(param_id(0), 66));
  }
}

TEST_F(ChunkManagerTest, FailedCopyBackKeepsTheOnlyCopyOnTheDevice) {
  for (const bool refuse_submit : {true, false}) {
    start(1, 1);
    manager().fetch(kA);
    { const Pin pin = manager().pin(kA); }
    rig_->binder.write(param_id(0), 33);
    if (refuse_submit) {
      rig_->engine.fail_submit(1);
    } else {
      rig_->engine.fail_wait(1);
    }
    EXPECT_THROW(manager().evict(kA), InjectedFailure);
    EXPECT_TRUE(manager().resident(kA));
    EXPECT_TRUE(rig_->binder.reads(param_id(0), 33));
    EXPECT_EQ(manager().counts().d2h_bytes, 0u);
    EXPECT_EQ(manager().counts().evictions, 0u);
    rig_->expect_consistent();
    EXPECT_TRUE(manager().make_room(kChunk, kNoCap)) << "it may still be evicted";
    EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 33));
  }
}

TEST_F(ChunkManagerTest, FailedPrefetchDoesNotKeepItsChunkFromLeaving) {
  start(2, 2);
  manager().fetch(kA);
  manager().fetch(kB);
  rig_->engine.fail_wait(1);
  EXPECT_THROW(manager().move_to_host(), InjectedFailure) << "the failure is told once";
  rig_->expect_consistent();
  manager().move_to_host();
  EXPECT_EQ(used(), 0u);
}

/// Host storage that an update has yet to fill with `value`.
class PendingUpdateTest : public ChunkManagerTest {
 protected:
  void pend(ChunkId chunk, std::uint8_t value) {
    manager().follow(&updates_);
    std::byte* host = rig_->host_payloads[index(chunk)]->data();
    updates_.submit(chunk, [host, value] { std::memset(host, value, kChunk); });
  }
  testing::FakeUpdates updates_;
};

TEST_F(PendingUpdateTest, AFetchReadsHostStorageAfterItsUpdate) {
  start(2, 2);
  pend(kA, 77);
  manager().fetch(kA);
  EXPECT_TRUE(updates_.pending(kA)) << "fetching ahead holds nobody up";
  const Pin pin = manager().pin(kA);
  EXPECT_FALSE(updates_.pending(kA));
  EXPECT_TRUE(rig_->binder.reads(param_id(0), 77));
}

TEST_F(PendingUpdateTest, AChunkOnTheDeviceIsPinnedAfterItsUpdate) {
  start(1, 1, {Placement::kDevice});
  pend(kA, 77);
  const Pin pin = manager().pin(kA);
  EXPECT_FALSE(updates_.pending(kA));
  EXPECT_TRUE(rig_->binder.reads(param_id(0), 77));
}

TEST_F(PendingUpdateTest, OtherChunksDoNotWait) {
  start(2, 2);
  pend(kA, 77);
  manager().fetch(kB);
  const Pin pin = manager().pin(kB);
  EXPECT_TRUE(updates_.pending(kA));
  EXPECT_TRUE(manager().update_pending(kA));
  EXPECT_FALSE(manager().update_pending(kB));
}

TEST_F(PendingUpdateTest, EvictingAChunkThatWasFetchedAheadLeavesTheUpdatedHostStorage) {
  start(1, 1);
  pend(kA, 77);
  manager().fetch(kA);
  manager().evict(kA);
  EXPECT_TRUE(rig_->host_storage_holds(param_id(0), 77));
}

TEST_F(PendingUpdateTest, AFailedUpdateIsToldToWhoeverPinsAndNothingIsKept) {
  for (const Placement placement : {Placement::kStream, Placement::kDevice}) {
    start(1, 1, {placement});
    manager().follow(&updates_);
    updates_.submit(kA, [] { throw InjectedFailure("update"); });
    if (placement == Placement::kStream) {
      manager().fetch(kA);
    }
    EXPECT_THROW((void)manager().pin(kA), InjectedFailure);
    rig_->expect_consistent();
    manager().follow(nullptr);
  }
}

// Every place where the engine is called, one after the other.
TEST_F(ChunkManagerTest, FailureAtTheNthCopyLeavesItUsable) {
  for (const bool refuse_submit : {true, false}) {
    for (std::size_t n = 1; n <= 12; ++n) {
      SCOPED_TRACE((refuse_submit ? "submit " : "wait ") + std::to_string(n));
      start(4, 2);
      if (refuse_submit) {
        rig_->engine.fail_submit(n);
      } else {
        rig_->engine.fail_wait(n);
      }
      std::size_t failures = 0;
      for (std::size_t step = 0; step < 12; ++step) {
        const ChunkId chunk = chunk_id(step % 4);
        const auto value = static_cast<std::uint8_t>(100 + step);
        try {
          ASSERT_TRUE(manager().make_room(kChunk, kNoCap));
          manager().fetch(chunk);
          const Pin pin = manager().pin(chunk);
          rig_->binder.write(param_id(step % 4), value);
        } catch (const InjectedFailure&) {
          ++failures;
          rig_->expect_consistent();
          rig_->binder.write(param_id(step % 4), value);  // wherever it is now
        }
      }
      EXPECT_EQ(failures, 1u);
      rig_->engine.never_fail();
      manager().move_to_host();
      EXPECT_EQ(used(), 0u);
      for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(rig_->host_storage_holds(param_id(i), static_cast<std::uint8_t>(108 + i)));
      }
    }
  }
}

}  // namespace
}  // namespace castor
