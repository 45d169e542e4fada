// Non-model memory that another allocator hands out (a GPU's): castor is asked before and told
// afterwards, and the device may refuse what the ledger has.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>

#include "core/error.h"
#include "core/fakes.h"
#include "core/machine.h"
#include "core/nonmodel_memory.h"
#include "core/steps.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

constexpr std::size_t kChunk = Net::kChunk;

TEST(LedgerTest, WhatIsTakenAnywayMayPassTheBudget) {
  Ledger ledger(TierKind::kDevice, 100);
  ledger.take_anyway(130);
  EXPECT_EQ(ledger.used(), 130u);
  EXPECT_EQ(ledger.available(), 0u);
  EXPECT_EQ(ledger.peak(), 130u);
  EXPECT_FALSE(ledger.try_take(1));
  EXPECT_TRUE(ledger.try_take(0));
  ledger.give_back(130);
  EXPECT_TRUE(ledger.try_take(100));
  ledger.give_back(100);
}

TEST(LedgerTest, NoPeakSeesWhatIsTakenUnnoted) {
  Ledger ledger(TierKind::kDevice, 100);
  ledger.take_unnoted(40);
  EXPECT_EQ(ledger.available(), 60u);
  EXPECT_EQ(ledger.peak(), 0u);
  ledger.give_back(40);
}

TEST(ForeignMemoryTest, RoomIsMadeBeforeAnAllocation) {
  SimulatedMachine machine(Net::row(3).layout(), 3 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  machine.run({enter(0), exit(0), enter(1), exit(1)});
  EXPECT_EQ(machine.rig.manager->slot_bytes(), 2 * kChunk);
  machine.nonmodel->make_room(2 * kChunk);
  EXPECT_EQ(machine.rig.manager->slot_bytes(), kChunk);
  machine.nonmodel->note_allocated(2 * kChunk);
  EXPECT_EQ(machine.rig.device->ledger().used(), 3 * kChunk);
  EXPECT_EQ(machine.nonmodel->peak_bytes(), 2 * kChunk);
  machine.nonmodel->note_freed(2 * kChunk);
  EXPECT_EQ(machine.nonmodel->bytes(), 0u);
}

TEST(ForeignMemoryTest, NoRoomIsAnErrorWithTheRuntimesFigures) {
  SimulatedMachine machine(Net::row(2).layout(), 2 * kChunk);
  machine.run({enter(0)});
  EXPECT_THROW(machine.nonmodel->make_room(2 * kChunk), OutOfMemory);
  EXPECT_EQ(machine.nonmodel->bytes(), 0u);
}

TEST(ForeignMemoryTest, ARefusalEvictsThoughTheLedgerHasRoom) {
  SimulatedMachine machine(Net::row(3).layout(), 100 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  machine.run({enter(0), exit(0), enter(1), exit(1), enter(2)});
  EXPECT_TRUE(machine.nonmodel->evict_refused(kChunk));
  EXPECT_EQ(machine.rig.manager->slot_bytes(), 2 * kChunk);
  EXPECT_TRUE(machine.nonmodel->evict_refused(50 * kChunk)) << "as far as chunks may leave";
  EXPECT_EQ(machine.rig.manager->slot_bytes(), kChunk) << "the one in use stays";
  EXPECT_FALSE(machine.nonmodel->evict_refused(kChunk));
  EXPECT_EQ(machine.runtime->counts().pressure_evictions, 2u);
}

TEST(ForeignMemoryTest, NothingIsReclaimedForAModelThatIsGone) {
  SimulatedMachine machine(Net::row(1).layout(), kChunk);
  machine.runtime.reset();
  EXPECT_NO_THROW(machine.nonmodel->make_room(2 * kChunk));
  EXPECT_FALSE(machine.nonmodel->evict_refused(1));
}

TEST(ForeignMemoryTest, MemoryThatAnotherPaysForComesBackWithoutAPeak) {
  SimulatedMachine machine(Net::row(1).layout(), 10 * kChunk);
  machine.nonmodel->note_allocated(kChunk);
  machine.nonmodel->hand_over(kChunk);
  EXPECT_EQ(machine.rig.device->ledger().used(), 0u);
  machine.nonmodel->note_allocated(3 * kChunk);
  machine.nonmodel->take_back(kChunk);
  machine.nonmodel->note_freed(kChunk);
  EXPECT_EQ(machine.nonmodel->bytes(), 3 * kChunk);
  EXPECT_EQ(machine.nonmodel->peak_bytes(), 3 * kChunk);
}

TEST(ForeignMemoryTest, AnAccountGivesBackWhatItHoldsWhenItEnds) {
  auto tier = std::make_shared<MemoryTier>(
      TierKind::kDevice, 100, std::make_unique<HeapArena>(std::make_shared<LiveBlocks>()));
  auto memory = std::make_unique<NonModelMemory>(tier);
  memory->note_allocated(70);
  memory.reset();
  EXPECT_EQ(tier->ledger().used(), 0u);
}

// Where a freed slot's bytes are the next allocation's, an operator may be reading them.
TEST(ForeignMemoryTest, BackwardKeepsItsPinsWhereFreedSlotsAreReused) {
  SimulatedMachine machine(Net::row(2).layout(), 2 * kChunk,
                           {.freed_slots = FreedSlots::kReusedAtOnce});
  machine.run({enter(0), exit(0), enter(1), exit(1), backward(1)});
  EXPECT_THROW(machine.nonmodel->make_room(2 * kChunk), OutOfMemory);
  EXPECT_TRUE(machine.rig.manager->resident(chunk_id(1)));
  EXPECT_EQ(machine.rig.manager->pins(chunk_id(1)), 1u);
}

}  // namespace
}  // namespace castor
