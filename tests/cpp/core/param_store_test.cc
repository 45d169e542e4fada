// Chunks whose storage is on NVMe: when the manager holds them in memory, and what the runtime says
// of them ahead.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "core/chunk_manager.h"
#include "core/error.h"
#include "core/fakes.h"
#include "core/machine.h"
#include "core/steps.h"

namespace castor {
namespace {

using testing::chunk_id;
using testing::FakeUpdates;
using testing::InjectedFailure;
using testing::module_id;
using testing::Net;
using testing::param_id;
using testing::Rig;
using testing::SimulatedMachine;

constexpr std::size_t kChunk = Net::kChunk;
const ChunkId kA = chunk_id(0);
const ChunkId kB = chunk_id(1);
const ChunkId kC = chunk_id(2);

/// Three chunks of one parameter each, the third one stored in memory, over a device for two.
class ParamStoreTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (rig_.manager) {
      rig_.expect_consistent();
    }
  }
  ChunkManager& manager() { return *rig_.manager; }
  Pin use(ChunkId chunk) {
    manager().fetch(chunk);
    return manager().pin(chunk);
  }

  Rig rig_{Net::row(3).layout(), 2 * kChunk, {}, {true, true, false}};
};

TEST_F(ParamStoreTest, TakeNoMemory) {
  EXPECT_EQ(rig_.host->ledger().used(), kChunk) << "the third one's";
  manager().add_payload(kA, PayloadKind::kGrad, kChunk);
  manager().add_payload(kA, state_payload(0), kChunk);
  EXPECT_EQ(rig_.host->ledger().used(), 2 * kChunk) << "states are not their business";
  for (const PayloadKind kind : {PayloadKind::kParam, PayloadKind::kGrad}) {
    EXPECT_EQ(manager().payload(kA, kind)->data(), nullptr);
    EXPECT_EQ(manager().payload(kA, kind)->bytes(), kChunk);
    EXPECT_EQ(manager().payload(kA, kind)->tier(), TierKind::kNvme);
  }
  EXPECT_TRUE(manager().stored(kA));
  EXPECT_FALSE(manager().stored(kC));
  EXPECT_EQ(rig_.binder.address(kA), nullptr);
}

TEST_F(ParamStoreTest, AreLeasedFromTheFetchUntilTheCopyIsOver) {
  manager().fetch(kA);
  EXPECT_EQ(rig_.store.num_leases(kA), 1u);
  EXPECT_EQ(rig_.binder.address(kA), nullptr) << "nobody finds the copy that is under way";
  {
    const Pin pin = manager().pin(kA);
    EXPECT_EQ(rig_.store.num_leases(kA), 0u);
    EXPECT_EQ(rig_.store.num_moved_out(kA), 1u);
    EXPECT_TRUE(rig_.reads(param_id(0), Rig::initial(0)));
  }
  const Pin again = manager().pin(kA);
  EXPECT_EQ(rig_.store.num_moved_out(kA), 1u) << "it had not moved";
}

TEST_F(ParamStoreTest, AreLetGoWhenAChunkLeavesBeforeItIsUsed) {
  manager().fetch(kA);
  manager().evict(kA);
  EXPECT_EQ(rig_.store.num_leased(), 0u);
  EXPECT_EQ(rig_.store.num_moved_out(kA), 0u);
  EXPECT_TRUE(rig_.reads(param_id(0), Rig::initial(0)));
}

TEST_F(ParamStoreTest, GetWhatWasWrittenOnTheDevice) {
  use(kA);
  manager().evict(kA);  // clean: any hold would be one too many
  EXPECT_EQ(manager().counts().d2h_bytes, 0u);
  {
    const Pin pin = use(kA);
    rig_.write(param_id(0), 77);
  }
  EXPECT_FALSE(rig_.host_storage_holds(param_id(0), 77));
  manager().evict(kA);
  EXPECT_TRUE(rig_.host_storage_holds(param_id(0), 77));
  EXPECT_EQ(rig_.binder.address(kA), nullptr);
  EXPECT_EQ(rig_.binder.write_backs().size(), 1u);
  EXPECT_EQ(rig_.binder.write_backs()[0].host, std::byte{Rig::initial(0)});
  EXPECT_EQ(rig_.binder.write_backs()[0].slot, std::byte{77});
}

TEST_F(ParamStoreTest, GetItToo) {
  {
    const Pin pin = use(kB);
    rig_.write(param_id(1), 78);
  }
  rig_.manager.reset();
  EXPECT_TRUE(rig_.host_storage_holds(param_id(1), 78)) << "when the manager goes";
}

TEST_F(ParamStoreTest, WrittenWhileTheyAreCopiedAreCopiedAgain) {
  manager().fetch(kA);
  rig_.write(param_id(0), 79);
  const Pin pin = manager().pin(kA);
  EXPECT_NE(rig_.binder.address(kA), nullptr);
  EXPECT_TRUE(rig_.reads(param_id(0), 79));
  EXPECT_TRUE(rig_.host_storage_holds(param_id(0), 79));
  EXPECT_EQ(rig_.store.num_leased(), 0u);
}

TEST_F(ParamStoreTest, AreReadAfterTheirUpdate) {
  FakeUpdates updates;
  manager().follow(&updates);
  updates.submit(kA, [&] {
    const auto hold = rig_.store.lease(kA);
    hold->wait(ParamAccess::kWrite);
    std::fill_n(hold->data(), kChunk, std::byte{80});
  });
  manager().fetch(kA);
  EXPECT_EQ(rig_.store.num_leases(kA), 1u) << "its read begins beside the update";
  EXPECT_TRUE(updates.pending(kA));
  {
    const Pin pin = manager().pin(kA);
    EXPECT_TRUE(rig_.reads(param_id(0), 80));
  }
  EXPECT_TRUE(rig_.host_storage_holds(param_id(0), 80));
  manager().follow(nullptr);
}

TEST_F(ParamStoreTest, ThatCannotBeLeasedLeaveTheChunkInTheStore) {
  rig_.store.fail_lease(1);
  EXPECT_THROW(manager().fetch(kA), InjectedFailure);
  EXPECT_FALSE(manager().resident(kA));
  EXPECT_EQ(rig_.device->ledger().used(), 0u);
  EXPECT_EQ(rig_.store.num_leased(), 0u);
  const Pin pin = use(kA);
  EXPECT_TRUE(rig_.reads(param_id(0), Rig::initial(0)));
}

TEST_F(ParamStoreTest, ThatCannotBeReadLeaveTheChunkInTheStore) {
  manager().fetch(kA);
  manager().fetch(kB);
  rig_.store.fail_wait(1);
  EXPECT_THROW((void)manager().pin(kA), InjectedFailure);
  EXPECT_FALSE(manager().resident(kA));
  EXPECT_EQ(rig_.store.num_leases(kA), 0u);
  EXPECT_EQ(rig_.store.num_leases(kB), 1u) << "the other one's copy goes on";
  const Pin b = manager().pin(kB);
  EXPECT_TRUE(rig_.reads(param_id(1), Rig::initial(1)));
  const Pin a = use(kA);
  EXPECT_TRUE(rig_.reads(param_id(0), Rig::initial(0)));
}

TEST_F(ParamStoreTest, ThatCannotBeWrittenKeepTheChunkOnTheDevice) {
  {
    const Pin pin = use(kA);
    rig_.write(param_id(0), 81);
  }
  rig_.store.fail_lease(1);
  EXPECT_THROW(manager().evict(kA), InjectedFailure);
  rig_.store.fail_wait(1);
  EXPECT_THROW(manager().evict(kA), InjectedFailure);
  rig_.engine.fail_wait(1);
  EXPECT_THROW(manager().evict(kA), InjectedFailure);
  EXPECT_TRUE(manager().resident(kA));
  EXPECT_TRUE(rig_.reads(param_id(0), 81));
  EXPECT_EQ(rig_.store.num_leased(), 0u);
  manager().evict(kA);
  EXPECT_TRUE(rig_.host_storage_holds(param_id(0), 81));
}

TEST_F(ParamStoreTest, KeepFetchesBackOnceTheWindowIsFull) {
  rig_.store.set_max_leases(1);
  EXPECT_FALSE(manager().fetch_blocks(kA));
  manager().fetch(kA);
  EXPECT_TRUE(manager().fetch_blocks(kB));
  EXPECT_FALSE(manager().fetch_blocks(kC)) << "it is stored in memory";
  const Pin pin = manager().pin(kA);
  EXPECT_FALSE(manager().fetch_blocks(kB));
  manager().fetch(kB);
  rig_.store.fail_wait(1);
  EXPECT_THROW((void)manager().pin(kB), InjectedFailure);
  EXPECT_FALSE(manager().fetch_blocks(kB)) << "what failed is not counted";
}

TEST_F(ParamStoreTest, AreNotPromoted) {
  EXPECT_THROW((void)manager().try_promote(kA), UsageError);
  EXPECT_EQ(rig_.device->ledger().used(), 0u);
  EXPECT_TRUE(manager().try_promote(kC));
}

/// Six modules of a chunk each, all but the last one stored on NVMe, and a device for two.
class ParamStoreAnnounceTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kModules = 6;

  void SetUp() override { machine_.rig.store.set_max_leases(3); }

  [[nodiscard]] const std::vector<ChunkId>& announced() const {
    return machine_.rig.store.announced();
  }
  static std::vector<std::size_t> accesses() {
    std::vector<std::size_t> modules;
    for (std::size_t i = 0; i < kModules; ++i) {
      modules.push_back(i);
    }
    for (std::size_t i = kModules; i-- > 0;) {
      modules.push_back(i);
    }
    return modules;
  }
  // What is used after the n-th access, soonest first.
  std::vector<ChunkId> expected_after(std::size_t access) {
    std::vector<ChunkId> chunks;
    const std::vector<std::size_t> modules = accesses();
    for (std::size_t i = access + 1; i < modules.size() && chunks.size() < 3; ++i) {
      const ChunkId chunk = chunk_id(modules[i]);
      if (machine_.rig.manager->stored(chunk) && !machine_.rig.manager->resident(chunk) &&
          std::find(chunks.begin(), chunks.end(), chunk) == chunks.end()) {
        chunks.push_back(chunk);
      }
    }
    return chunks;
  }
  void finish() {
    machine_.runtime->finish_step();
    EXPECT_EQ(machine_.rig.store.num_leased(), 0u);
  }

  SimulatedMachine machine_{Net::row(kModules).layout(),
                            2 * kChunk,
                            {.warmup_nonmodel_ratio = 0.0},
                            {},
                            {true, true, true, true, true, false}};
};

TEST_F(ParamStoreAnnounceTest, FollowThePlanAndSkipWhatIsOnTheDevice) {
  machine_.run(testing::row_step(kModules));
  finish();
  EXPECT_EQ(machine_.rig.store.num_announced(), 0u) << "there was no plan";
  for (int step = 0; step < 2; ++step) {
    std::size_t access = 0;
    for (const testing::Act& act : testing::row_step(kModules)) {
      machine_.act(act);
      if (act.kind == testing::Act::Kind::kEnter || act.kind == testing::Act::Kind::kBackward) {
        EXPECT_EQ(announced(), expected_after(access)) << "access " << access;
        ++access;
      }
    }
    finish();
  }
  machine_.act(testing::enter(0));
  EXPECT_EQ(announced(), (std::vector<ChunkId>{chunk_id(2), chunk_id(3), chunk_id(4)}))
      << "1 is on its way already";
  machine_.act(testing::exit(0));
}

TEST_F(ParamStoreAnnounceTest, AreNoneWhereNothingIsPlanned) {
  machine_.run(testing::row_step(kModules));
  finish();
  machine_.run({testing::enter(0), testing::exit(0), testing::enter(1), testing::exit(1)},
               PassMode::kInference);
  EXPECT_EQ(machine_.rig.store.num_announced(), 0u);
  machine_.act(testing::enter(3));  // not where the plan begins
  EXPECT_EQ(machine_.rig.store.num_announced(), 0u);
  machine_.act(testing::exit(3));
}

TEST_F(ParamStoreAnnounceTest, ThatFindNoMemoryOnTheHostSendNothingFromTheDevice) {
  machine_.run({testing::enter(0), testing::exit(0)});
  machine_.rig.store.set_capacity(0);
  try {
    machine_.act(testing::enter(1));
    FAIL() << "a chunk was brought in where there is no memory for it";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.tier(), TierKind::kHost);
  }
  EXPECT_TRUE(machine_.rig.manager->resident(kA)) << "its leaving would not have helped";
  EXPECT_EQ(machine_.rig.manager->counts().evictions, 0u);
  machine_.rig.store.set_capacity(1);
  machine_.act(testing::enter(1));
  EXPECT_TRUE(machine_.rig.manager->resident(kB));
  finish();
}

TEST_F(ParamStoreAnnounceTest, AResidentChunkIsPinnedForWhoReadsItOutsideItsModule) {
  machine_.act(testing::enter(0));
  {
    std::vector<Pin> pins;
    std::optional<Pin> pin = machine_.runtime->pin_for_operator(kA);
    ASSERT_TRUE(pin);
    pins.push_back(std::move(*pin));
    EXPECT_FALSE(machine_.runtime->pin_for_operator(kB)) << "it is on the host";
    machine_.act(testing::exit(0));
    EXPECT_EQ(machine_.rig.manager->pins(kA), 1u);
    EXPECT_THROW(machine_.rig.manager->evict(kA), UsageError);
    machine_.runtime->unpin(pins);
  }
  EXPECT_EQ(machine_.rig.manager->pins(kA), 0u);
  machine_.rig.manager->fetch(kB);
  EXPECT_FALSE(machine_.runtime->pin_for_operator(kB))
      << "its copy is under way: it is read on the host";
  finish();
}

}  // namespace
}  // namespace castor
