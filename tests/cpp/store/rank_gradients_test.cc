// Backward passes of two ranks whose gradients become their mean. The ranks are threads.

#include "store/rank_gradients.h"

#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/consistency_check.h"
#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kRanks = 2;
constexpr std::size_t kNumel = 1024;
constexpr std::size_t kChunk = 4 * kNumel;  // a page
constexpr std::size_t kChunks = 6;

Bytes floats(float value) { return filled_with(value, kNumel); }

/// Gradients of a TestStore, which no tensor shows.
class StoredGradients final : public ChunkGradients {
 public:
  explicit StoredGradients(TestStore& store) : store_(store), marks_(store.layout) {}

  /// Writes a gradient of the pass under way.
  void write(ChunkId chunk, const Bytes& values) {
    std::byte* const first = store_.gradients_sharded(chunk) ? store_.gradient_shards->copy(chunk)
                                                             : payload(chunk)->data();
    std::memcpy(first, values.data(), values.size());
    marks_.fresh[index(chunk)] = true;
    marks_.present[index(chunk)] = true;
    marks_.scale = 1.0;
  }

  [[nodiscard]] Payload* payload(ChunkId chunk) const override {
    return store_.manager->payload(chunk, PayloadKind::kGrad).get();
  }
  [[nodiscard]] bool present(ParamId param) const override { return marks_.present[index(param)]; }
  [[nodiscard]] bool untouched(ParamId /*param*/) const override { return true; }
  [[nodiscard]] bool seen(ChunkId /*chunk*/) const override { return false; }
  [[nodiscard]] bool in_several_passes(ChunkId /*chunk*/) const override { return false; }
  [[nodiscard]] GradientMarks marks() const override { return marks_; }
  [[nodiscard]] GradientShards::Contents contents_of_copy(ChunkId /*chunk*/) const override {
    return GradientShards::Contents::kZeros;
  }
  [[nodiscard]] CopyTicket last_copy_of(ChunkId /*chunk*/) const override {
    return CopyTicket::kNone;
  }
  [[nodiscard]] std::unique_ptr<ComputeFence> fence() const override {
    return std::make_unique<ComputeFence>();
  }
  void wait(ChunkId /*chunk*/) override {}
  void wait_beside(ChunkId /*chunk*/) override {}
  void leave_to_holders(ChunkId /*chunk*/) override {}
  void make_present(ParamId param, double /*scale*/) override {
    marks_.present[index(param)] = true;
  }
  void average(ChunkId chunk, const std::function<void()>& work) override {
    work();
    hand_over(chunk);
  }
  void gather_in(DeviceGradients* /*gathered*/) override {}
  void hand_over(ChunkId chunk) override { marks_.fresh[index(chunk)] = false; }

 private:
  TestStore& store_;
  GradientMarks marks_;
};

/// A gate without operators.
class OpenGate final : public OperatorGate {
 public:
  void close(std::size_t /*group*/) override {}
  void open(std::size_t /*group*/) override {}
  void pass(std::size_t /*group*/) override {}
  void pass_all() override {}
};

/// One rank: its store, and the reduction of its gradients beside backward.
struct Rank {
  Rank(const StoreOptions& options, Collectives& passes)
      : store(SmallModel::row(kChunks, kNumel).layout(kChunk, nullptr, kRanks), options),
        gradients(store),
        consistency(passes, store.layout),
        reduction(options.ranks->gradients, options.ranks->sums, consistency, store.layout,
                  {.gradients = gradients,
                   .storage = store.shared ? store.shared->gradients().storage.get() : nullptr,
                   .gradient_shards = store.gradient_shards.get(),
                   .shards = store.shards,
                   .staging = {},
                   .copies = nullptr},
                  store.executor, *store.host, *store.device_tier) {}

  /// Leaves the host this many bytes.
  [[nodiscard]] Reservation fill_host(std::size_t free) const {
    Ledger& ledger = store.host->ledger();
    return ledger.reserve(ledger.budget() - ledger.used() - free, "");
  }
  void gradient(ChunkId chunk, float value) {
    reduction.arriving(chunk, gate);
    gradients.write(chunk, floats(value));
  }
  /// A chunk that has all its gradients of the pass.
  void backward(ChunkId chunk, float value) {
    gradient(chunk, value);
    reduction.completed(chunk, gate);
  }

  TestStore store;
  StoredGradients gradients;
  OpenGate gate;
  ConsistencyCheck consistency;
  RankGradients reduction;
};

/// Host storage of gradients: one for both ranks, or a shard on each.
enum class Storage { kShared, kSharded };

class RankGradientsTest : public ::testing::TestWithParam<Storage> {
 protected:
  /// Runs `work` on two ranks, each with a store; returns what each threw.
  static std::vector<std::string> run(const std::function<void(Rank&, std::size_t)>& work) {
    ThreadMessages messages(kRanks);
    ThreadRanks passes(kRanks, 0, std::chrono::microseconds(0));
    ThreadRanks gradients(kRanks, 1, std::chrono::microseconds(0));  // on a thread of its own
    std::array<Collectives*, kRanks> of_gradients{};
    std::barrier begun(2 * kRanks);
    std::barrier over(2 * kRanks);
    const std::jthread second([&] {
      gradients.run([&](Collectives& rank) {
        of_gradients.at(rank.rank()) = &rank;
        begun.arrive_and_wait();
        over.arrive_and_wait();
      });
    });
    passes.run([&](Collectives& rank) {
      begun.arrive_and_wait();
      StoreOptions options;
      options.shares_host_storage = GetParam() == Storage::kShared;
      options.zero_stage = GetParam() == Storage::kSharded ? 2 : 0;
      options.ranks = groups_of(rank, &messages);
      options.ranks->gradients = {of_gradients.at(rank.rank()), [](Collectives*) {}};
      try {
        Rank own(options, rank);
        barrier(rank);
        work(own, rank.rank());
      } catch (...) {
        of_gradients.at(rank.rank())->leave();
        rank.leave();
        over.arrive_and_wait();
        throw;
      }
      over.arrive_and_wait();
    });
    return passes.failures();
  }
  static std::size_t copy_bytes() {
    return GetParam() == Storage::kShared ? SharedHostStorage::size_of(kChunk) : kChunk;
  }
  /// The chunks in the order in which backward completes them.
  static std::vector<ChunkId> last_to_first() {
    std::vector<ChunkId> order;
    for (std::size_t i = kChunks; i-- > 0;) {
      order.push_back(chunk_id(i));
    }
    return order;
  }
  static void expect_mean(Rank& rank, float mean) {
    for (std::size_t i = 0; i < kChunks; ++i) {
      EXPECT_EQ(rank.store.read_gradient(param_id(i)), floats(mean)) << "chunk " << i;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Storage, RankGradientsTest,
                         ::testing::Values(Storage::kShared, Storage::kSharded),
                         [](const auto& instance) {
                           return instance.param == Storage::kShared ? "Shared" : "Sharded";
                         });

const std::vector<std::string> kNoFailures(kRanks);

TEST_P(RankGradientsTest, EveryRankHasTheMean) {
  EXPECT_EQ(run([](Rank& own, std::size_t rank) {
              for (int pass = 0; pass < 3; ++pass) {
                const auto value = static_cast<float>(pass) + static_cast<float>(rank);
                for (const ChunkId chunk : last_to_first()) {
                  own.backward(chunk, value);
                }
                own.reduction.end_backward(own.gate);
                own.reduction.begin_step({}, own.gate);
                expect_mean(own, static_cast<float>(pass) + 0.5F);
                own.reduction.end_step();
              }
            }),
            kNoFailures);
}

// A rank that is ahead keeps full copies until the others come. Where the host has no room for
// one more, it waits for them, however late they are.
TEST_P(RankGradientsTest, ARankWithoutRoomForACopyWaitsForTheOthers) {
  EXPECT_EQ(run([](Rank& own, std::size_t rank) {
              const Reservation filler = own.fill_host(2 * copy_bytes());
              if (rank == 1) {
                std::this_thread::sleep_for(std::chrono::milliseconds(50));
              }
              for (const ChunkId chunk : last_to_first()) {
                own.backward(chunk, static_cast<float>(rank));
              }
              own.reduction.end_backward(own.gate);
              expect_mean(own, 0.5F);
            }),
            kNoFailures);
}

// The module of a chunk that both ranks have begun but not completed comes first in the order.
TEST_P(RankGradientsTest, ARankWithoutRoomLeavesWhatIsIncompleteToTheEndOfThePass) {
  EXPECT_EQ(run([](Rank& own, std::size_t rank) {
              const Reservation filler = own.fill_host(2 * copy_bytes());
              const std::vector<ChunkId> order = last_to_first();
              own.gradient(order[0], static_cast<float>(rank));
              for (std::size_t i = 1; i < order.size(); ++i) {
                own.backward(order[i], static_cast<float>(rank));
              }
              own.reduction.completed(order[0], own.gate);
              own.reduction.end_backward(own.gate);
              expect_mean(own, 0.5F);
            }),
            kNoFailures);
}

TEST_P(RankGradientsTest, NoRoomWithNothingToWaitForIsOutOfMemory) {
  const std::vector<std::string> failures = run([](Rank& own, std::size_t /*rank*/) {
    const Reservation filler = own.fill_host(copy_bytes());
    own.gradient(chunk_id(kChunks - 1), 1.0F);
    EXPECT_THROW(own.gradient(chunk_id(kChunks - 2), 1.0F), OutOfMemory);
  });
  EXPECT_EQ(failures, kNoFailures);
}

}  // namespace
}  // namespace castor::testing
