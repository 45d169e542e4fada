#include "ranks/rank_weights.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "core/units.h"
#include "host/mmap_arena.h"
#include "ranks/shared_file.h"
#include "ranks/thread_nodes.h"

namespace castor {
namespace {

constexpr std::size_t kUnit = 64;

/// The weights of one rank: host storage that all share, or its own, and a device that some may be
/// on.
class Weights {
 public:
  Weights(std::span<const std::size_t> bytes, const SharedHostStorage* shared_storage)
      : device_(
            std::make_shared<MemoryTier>(TierKind::kDevice, kGiB, std::make_unique<MmapArena>())) {
    std::unique_ptr<Arena> arena;
    if (shared_storage != nullptr) {
      arena = shared_storage->make_arena();
    } else {
      arena = std::make_unique<MmapArena>();
    }
    const auto host = std::make_shared<MemoryTier>(TierKind::kHost, kGiB, std::move(arena));
    for (const std::size_t chunk : bytes) {
      payloads_.push_back(std::make_unique<Payload>(host, chunk, ""));
    }
  }

  [[nodiscard]] const Payload& operator[](std::size_t chunk) const { return *payloads_[chunk]; }
  [[nodiscard]] std::span<std::byte> bytes(std::size_t chunk) const {
    return {payloads_[chunk]->data(), payloads_[chunk]->bytes()};
  }
  [[nodiscard]] std::vector<const Payload*> all() const {
    std::vector<const Payload*> all;
    for (const auto& payload : payloads_) {
      all.push_back(payload.get());
    }
    return all;
  }
  /// To the device, or to the host.
  void move(std::size_t chunk) {
    Payload& payload = *payloads_[chunk];
    if (payload.away()) {
      std::memcpy(payload.host_storage(), payload.data(), payload.bytes());
      payload.move_to_host().reset();
      return;
    }
    Block block = device_->allocate(payload.bytes(), "");
    std::memcpy(block.data(), payload.data(), payload.bytes());
    payload.move_to(device_, std::move(block));
  }

 private:
  std::shared_ptr<MemoryTier> device_;
  std::vector<std::unique_ptr<Payload>> payloads_;
};

std::size_t up_to(std::minstd_rand& random, std::size_t most) { return random() % (most + 1); }

/// The same on every rank that passes the same generator.
void edit(std::minstd_rand& random, std::span<std::byte> bytes) {
  const std::size_t begin = up_to(random, bytes.size());
  const std::size_t count = up_to(random, std::min<std::size_t>(bytes.size() - begin, 30'000));
  std::memset(bytes.data() + begin, static_cast<int>(random() % 251), count);
}

class RankWeightsTest : public ::testing::TestWithParam<RankCase> {
 protected:
  [[nodiscard]] static std::vector<std::size_t> sizes() {
    const std::size_t unit = GetParam().ranks * kUnit;
    return {unit, 70 * unit, 701 * unit, 3 * unit};
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, RankWeightsTest,
                         ::testing::Values(RankCase{2, true}, RankCase{3, true}, RankCase{4, true},
                                           RankCase{2, false}, RankCase{3, false},
                                           RankCase{4, true, 2}, RankCase{6, true, 3},
                                           RankCase{6, true, 2}, RankCase{8, true, 4}),
                         name_of);

// Every rank edits all weights, has some of them on its device, and updates its part of each: all
// see what one that did everything alone would.
TEST_P(RankWeightsTest, EveryRankSeesAllUpdatesAndItsOwnEdits) {
  ThreadRanks threads(GetParam().ranks, 5);
  ThreadMessages messages(GetParam().ranks);
  const std::size_t nodes = GetParam().nodes;
  const std::vector<std::size_t> sizes = this->sizes();
  threads.run([&](Collectives& group) {
    std::unique_ptr<SharedHostStorage> shared_storage;
    if (GetParam().shared) {
      std::size_t total = 0;
      for (const std::size_t bytes : sizes) {
        total += SharedHostStorage::size_of(bytes);
      }
      NodeHostStorage made = share_host_storage(group, group.size() / nodes, total);
      ASSERT_NE(made.storage, nullptr) << made.refusal;
      shared_storage = std::move(made.storage);
    }
    RankWeights weights(on_nodes(group, nodes, messages), shared_storage.get());
    Weights own(sizes, shared_storage.get());
    std::vector<std::vector<std::byte>> expected;
    for (const std::size_t bytes : sizes) {
      expected.emplace_back(bytes);
    }
    std::minstd_rand common(11);
    std::minstd_rand alone(static_cast<unsigned>(group.rank()) + 1);
    const auto check = [&](int step, const char* when) {
      for (std::size_t chunk = 0; chunk < sizes.size(); ++chunk) {
        ASSERT_TRUE(std::ranges::equal(own.bytes(chunk), expected[chunk]))
            << when << ", step " << step << ", chunk " << chunk << ", rank " << group.rank();
      }
    };
    for (int step = 0; step < 30; ++step) {
      for (std::size_t chunk = 0; chunk < sizes.size(); ++chunk) {
        if (alone() % 3 == 0) {
          own.move(chunk);
        }
        for (std::size_t i = common() % 4; i > 0; --i) {
          std::minstd_rand again = common;
          edit(common, own.bytes(chunk));
          edit(again, expected[chunk]);
        }
      }
      check(step, "after edits");
      barrier(group);  // nobody reads weights from here to the end of the update, or load
      if (step % 7 == 3) {
        for (std::size_t chunk = 0; chunk < sizes.size(); ++chunk) {
          std::ranges::fill(expected[chunk], static_cast<std::byte>(step));
          std::ranges::fill(own.bytes(chunk), static_cast<std::byte>(step));
        }
        weights.settle(own.all());
        check(step, "after a load");
        continue;
      }
      for (std::size_t chunk = 0; chunk < sizes.size(); ++chunk) {
        const std::size_t shard = sizes[chunk] / group.size();
        std::byte* const at = weights.begin_update(own[chunk]);
        for (std::size_t i = 0; i < sizes[chunk]; i += 1 + common() % 5000) {
          const auto value = static_cast<std::byte>(common());
          expected[chunk][i] = value;
          if (i / shard == group.rank()) {
            at[i] = value;
          }
        }
        if (step % 2 == 0) {
          const Payload* const one = &own[chunk];
          weights.gather(std::span(&one, 1));
        }
      }
      if (step % 2 == 1) {
        weights.gather(own.all());
      }
      check(step, "after an update");
    }
    EXPECT_EQ(weights.figures().bytes_sent() == 0, GetParam().shared && nodes == 1);
    const std::size_t parts =
        std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}) / group.size();
    EXPECT_EQ(weights.figures().bytes_crossed(), 30 * (nodes - 1) * parts);
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(GetParam().ranks));
}

// Of bytes that ranks wrote differently, all see those of the rank whose part they are in.
TEST_P(RankWeightsTest, ARanksShardCountsWhereEditsDiffer) {
  ThreadRanks threads(GetParam().ranks, 6);
  ThreadMessages messages(GetParam().ranks);
  threads.run([&](Collectives& group) {
    const std::vector<std::size_t> sizes = {group.size() * 100 * kUnit};
    NodeHostStorage made;
    if (GetParam().shared) {
      made = share_host_storage(group, group.size() / GetParam().nodes,
                                SharedHostStorage::size_of(sizes[0]));
    }
    RankWeights weights(on_nodes(group, GetParam().nodes, messages), made.storage.get());
    Weights own(sizes, made.storage.get());
    std::ranges::fill(own.bytes(0), static_cast<std::byte>(group.rank() + 1));
    barrier(group);
    static_cast<void>(weights.begin_update(own[0]));
    weights.gather(own.all());
    const std::size_t shard = sizes[0] / group.size();
    for (std::size_t i = 0; i < sizes[0]; ++i) {
      ASSERT_EQ(own.bytes(0)[i], static_cast<std::byte>(i / shard + 1));
    }
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(GetParam().ranks));
}

}  // namespace
}  // namespace castor
