#include "ranks/rank_reduction.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "core/units.h"
#include "host/mmap_arena.h"
#include "parallel/thread_executor.h"
#include "ranks/shared_file.h"
#include "ranks/thread_nodes.h"

namespace castor {
namespace {

class RankReductionTest : public ::testing::TestWithParam<RankCase> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RankReductionTest,
                         ::testing::Values(RankCase{2, true}, RankCase{3, true}, RankCase{4, true},
                                           RankCase{2, false}, RankCase{3, false},
                                           RankCase{4, true, 2}, RankCase{6, true, 3},
                                           RankCase{6, true, 2}, RankCase{8, true, 4},
                                           RankCase{4, false, 2}),
                         name_of);

// Of this rank's parts: their sums, but from the last machine, and their mean, but from the one
// before it, which has it last.
std::size_t crossings(std::size_t node, std::size_t nodes) {
  return nodes == 1 ? 0 : std::size_t{node + 1 < nodes} + std::size_t{node + 2 != nodes};
}

std::span<float> floats(const Payload& payload) {
  return {reinterpret_cast<float*>(payload.data()), payload.bytes() / sizeof(float)};
}

// Gradients of several windows; a rank that has them on its device; ones that a rank leaves as they
// are, and reads from the common memory.
TEST_P(RankReductionTest, EveryRankHasTheMeanInRankOrder) {
  const std::size_t size = GetParam().ranks;
  const std::size_t nodes = GetParam().nodes;
  ThreadRanks threads(size, 4);
  ThreadMessages messages(size);
  threads.run([&](Collectives& group) {
    const std::size_t bytes = size * 64 * 1100;
    const std::shared_ptr<Collectives> ranks = on_nodes(group, nodes, messages);
    std::unique_ptr<SharedHostStorage> shared_storage;
    std::unique_ptr<Arena> arena = std::make_unique<MmapArena>();
    if (GetParam().shared) {
      NodeHostStorage made =
          share_host_storage(group, size / nodes, SharedHostStorage::size_of(bytes));
      ASSERT_NE(made.storage, nullptr) << made.refusal;
      shared_storage = std::move(made.storage);
      arena = shared_storage->make_arena();
    }
    const auto host = std::make_shared<MemoryTier>(TierKind::kHost, kGiB, std::move(arena));
    const auto device =
        std::make_shared<MemoryTier>(TierKind::kDevice, kGiB, std::make_unique<MmapArena>());
    Payload gradients(host, bytes, "");
    ThreadExecutor executor(2);
    RankFigures figures;
    RankReduction reduction(*ranks, shared_storage.get(), executor,
                            device->allocate(size * 64 * 300 + 64, ""), figures);
    std::vector<float> before(bytes / sizeof(float), 0.0F);
    for (unsigned pass = 0; pass < 8; ++pass) {
      std::vector<float> sum(before.size(), 0.0F);
      for (std::size_t rank = 0; rank < size; ++rank) {
        std::minstd_rand random(100 * pass + static_cast<unsigned>(rank) + 1);
        for (std::size_t i = 0; i < sum.size(); ++i) {
          const bool skips = pass % 3 == 2 && rank == pass % size && i > sum.size() / 2;
          const float added = static_cast<float>(random() % 1000) / 7.0F;
          const float value = skips ? before[i] : before[i] + added;
          sum[i] = rank == 0 ? value : sum[i] + value;
          if (rank == group.rank() && !skips) {
            floats(gradients)[i] += added;
          }
        }
      }
      if (group.rank() == 1 && pass == 3) {
        Block block = device->allocate(bytes, "");
        std::memcpy(block.data(), gradients.data(), bytes);
        gradients.move_to(device, std::move(block));
      }
      reduction.reduce(gradients, ScalarType::kFloat32);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        before[i] = sum[i] / static_cast<float>(size);
        ASSERT_EQ(floats(gradients)[i], before[i]) << i << " on rank " << group.rank();
      }
      barrier(group);  // all have read
    }
    const std::size_t node = size / nodes;
    if (!GetParam().shared) {
      EXPECT_EQ(figures.bytes_sent(), 16 * (size - 1) * bytes / size);
      return;
    }
    EXPECT_EQ(figures.bytes_crossed(), 8 * crossings(group.rank() / node, nodes) * bytes / node);
    EXPECT_EQ(figures.bytes_sent() - figures.bytes_crossed(), 8 * (node - 1) * bytes / node);
  });
  for (const std::string& failure : threads.failures()) {
    EXPECT_EQ(failure, "");
  }
}

// One of its machine hears of it there, and ends; others from the one of their place.
TEST(RankReductionOnNodesTest, ARankThatEndsIsMissedByAll) {
  constexpr std::size_t kRanks = 6;
  constexpr std::size_t kBytes = kRanks * 64 * 500;
  ThreadRanks threads(kRanks, 4);
  ThreadMessages messages(kRanks);
  std::barrier<> all_have(kRanks);
  threads.run([&](Collectives& group) {
    const std::shared_ptr<Collectives> ranks = on_nodes(group, 3, messages);
    NodeHostStorage made = share_host_storage(group, 2, SharedHostStorage::size_of(kBytes));
    ASSERT_NE(made.storage, nullptr) << made.refusal;
    const auto host =
        std::make_shared<MemoryTier>(TierKind::kHost, kGiB, made.storage->make_arena());
    const auto memory =
        std::make_shared<MemoryTier>(TierKind::kHost, kGiB, std::make_unique<MmapArena>());
    Payload gradients(host, kBytes, "");
    ThreadExecutor executor(1);
    RankFigures figures;
    RankReduction reduction(
        *ranks, made.storage.get(), executor,
        memory->allocate(RankReduction::window_bytes(kBytes, kRanks, 2, ReducedOn::kHost), ""),
        figures);
    reduction.reduce(gradients, ScalarType::kFloat32);
    all_have.arrive_and_wait();
    if (group.rank() == 3) {
      messages.kill(3);
      ranks->node()->leave();
      return;
    }
    try {
      reduction.reduce(gradients, ScalarType::kFloat32);
    } catch (const Error&) {
      messages.kill(group.rank());  // its process ends
      throw;
    }
  });
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    const std::string& failure = threads.failures()[rank];
    EXPECT_EQ(failure.empty(), rank == 3);
    EXPECT_TRUE(rank == 3 || failure.find(" lost the others: rank ") != std::string::npos)
        << failure;
  }
}

class RankShardReductionTest : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RankShardReductionTest, ::testing::Values(2, 3, 4));

// At once, and in several windows.
TEST_P(RankShardReductionTest, ARankHasTheMeanOfItsShard) {
  const std::size_t size = GetParam();
  ThreadRanks threads(size, 4);
  threads.run([&](Collectives& group) {
    const auto host =
        std::make_shared<MemoryTier>(TierKind::kHost, kGiB, std::make_unique<MmapArena>());
    ThreadExecutor executor(2);
    RankFigures figures;
    RankReduction reduction(group, nullptr, executor, host->allocate(size * 64 * 300, ""), figures);
    std::size_t sent = 0;
    for (const std::size_t lines : {1, 300, 1100}) {
      const std::size_t numel = size * lines * 16;
      const auto value = [numel](std::size_t rank, std::size_t i) {
        return static_cast<float>((rank * numel + i) * 2654435761U % 1000) / 7.0F;
      };
      std::vector<float> own(numel);
      for (std::size_t i = 0; i < numel; ++i) {
        own[i] = value(group.rank(), i);
      }
      std::vector<float> shard(numel / size);
      reduction.reduce_scatter(std::as_bytes(std::span(own)), DeviceReduction::From::kHost,
                               std::as_writable_bytes(std::span(shard)), ScalarType::kFloat32);
      for (std::size_t i = 0; i < shard.size(); ++i) {
        const std::size_t of_all = group.rank() * shard.size() + i;
        float sum = value(0, of_all);
        for (std::size_t rank = 1; rank < size; ++rank) {
          sum += value(rank, of_all);
        }
        ASSERT_EQ(shard[i], sum / static_cast<float>(size)) << i << " on rank " << group.rank();
      }
      sent += (size - 1) * shard.size() * sizeof(float);
    }
    EXPECT_EQ(figures.bytes_sent(), sent);
  });
  for (const std::string& failure : threads.failures()) {
    EXPECT_EQ(failure, "");
  }
}

}  // namespace
}  // namespace castor
