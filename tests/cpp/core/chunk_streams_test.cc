#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "core/chunk_manager.h"
#include "core/fake_streams.h"
#include "core/fakes.h"

// A chunk manager whose device computes on streams: every use of a slot, of a copy and of memory
// that a slot gave back has to be in order, whichever stream the model runs on and whoever evicts.
namespace castor {
namespace {

using testing::FakeStreams;
using testing::HeapArena;
using testing::LiveBlocks;
using testing::Net;
using testing::PoolArena;
using testing::StreamedCopies;

constexpr std::size_t kBytes = Net::kChunk;
constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr StreamId kSide{3};

/// Addresses and versions: what parameters hold is written by kernels.
class AddressBinder final : public ParamBinder {
 public:
  explicit AddressBinder(std::size_t num_chunks) : addresses(num_chunks), versions(num_chunks) {}
  void bind(ChunkId chunk, std::byte* address) noexcept override {
    addresses[index(chunk)] = address;
  }
  void snapshot(ChunkId chunk) noexcept override { snapshots_[chunk] = versions[index(chunk)]; }
  bool written_since_snapshot(ChunkId chunk) const noexcept override {
    const auto found = snapshots_.find(chunk);
    return found != snapshots_.end() && found->second != versions[index(chunk)];
  }
  void before_write_back(ChunkId, const std::byte*, const std::byte*) override {}

  std::vector<std::byte*> addresses;
  std::vector<int> versions;

 private:
  std::map<ChunkId, int> snapshots_;
};

struct Machine {
  FakeStreams streams;
  ChunkLayout layout;
  PoolArena* arena = nullptr;  // the tier's
  std::shared_ptr<ComputeStream> compute =
      std::make_shared<ComputeStream>(kA, [this](StreamId a, StreamId b) { streams.order(a, b); });
  std::shared_ptr<MemoryTier> device;
  std::shared_ptr<MemoryTier> host = std::make_shared<MemoryTier>(
      TierKind::kHost, 1u << 20, std::make_unique<HeapArena>(std::make_shared<LiveBlocks>()));
  StreamedCopies copies{streams};
  AddressBinder binder;
  std::unique_ptr<ChunkManager> manager;
  std::vector<int> values;  // what each chunk holds once all is done
  int wrong = 0;
  int next_value = 1;

  explicit Machine(std::size_t num_chunks, std::size_t num_slots, unsigned seed = 0)
      : streams(seed), layout(Net::row(num_chunks).layout()), binder(num_chunks) {
    auto pools = std::make_unique<PoolArena>(streams, kBytes);
    arena = pools.get();
    device = std::make_shared<MemoryTier>(TierKind::kDevice, num_slots * kBytes, std::move(pools),
                                          compute);
    manager = std::make_unique<ChunkManager>(layout, std::vector(num_chunks, Placement::kStream),
                                             device, host, copies, binder);
    for (std::size_t i = 0; i < num_chunks; ++i) {
      std::byte* const host = manager->payload(chunk(i), PayloadKind::kParam)->data();
      values.push_back(next_value);
      std::memset(host, next_value++, kBytes);
      binder.addresses[i] = host;
    }
  }
  static ChunkId chunk(std::size_t i) { return ChunkId{static_cast<std::uint32_t>(i)}; }

  /// Kernels of `stream` over the memory that the parameters have now.
  void read(std::size_t i, StreamId stream) {
    streams.enqueue(stream, [this, data = binder.addresses[i], want = values[i]] {
      wrong += data[0] != std::byte(want) || data[kBytes - 1] != std::byte(want);
    });
  }
  void write(std::size_t i, StreamId stream) {
    values[i] = next_value++ % 250;
    ++binder.versions[i];
    streams.enqueue(stream, [data = binder.addresses[i], value = values[i]] {
      std::memset(data, value, kBytes);
    });
  }
  /// A temporary of torch's on a stream: what the stream's pool gives is overwritten at once.
  void scratch(StreamId stream) {
    std::byte* const data = arena->allocate_on(kBytes, stream);
    streams.enqueue(stream, [data] { std::memset(data, 255, kBytes); });
    arena->deallocate_behind(data, kBytes, stream);
  }
  void use(std::size_t i) {
    if (!manager->resident(chunk(i))) {
      static_cast<void>(manager->make_room(kBytes, ~std::size_t{0}));
      manager->fetch(chunk(i));
    }
    const Pin pin = manager->pin(chunk(i));
    read(i, compute->id());
  }
  [[nodiscard]] bool host_storage_has_its_values() {
    bool all = true;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::byte* const host = manager->payload(chunk(i), PayloadKind::kParam)->data();
      all = all && host[0] == std::byte(values[i]);
    }
    return all;
  }
};

TEST(ChunkStreamsTest, AWriteBackIsBehindTheStreamThatWrote) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Machine machine(2, 1, seed);
    machine.use(0);
    machine.write(0, kA);
    machine.manager->evict(machine.chunk(0));  // by whoever allocates, on whatever stream
    EXPECT_TRUE(machine.host_storage_has_its_values()) << "seed " << seed;
  }
}

TEST(ChunkStreamsTest, ASlotGoesBackBehindTheCopyIntoIt) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Machine machine(2, 2, seed);
    machine.manager->fetch(machine.chunk(0));  // ahead: nobody has used it
    machine.manager->evict(machine.chunk(0));
    std::byte* const data = machine.arena->allocate_on(kBytes, kA);
    machine.streams.enqueue(kA, [data] { std::memset(data, 255, kBytes); });
    machine.streams.run_all();
    EXPECT_EQ(data[0], std::byte{255}) << "the copy came after the block's next user";
    machine.arena->deallocate_behind(data, kBytes, kA);
  }
}

TEST(ChunkStreamsTest, AModelThatMovesToAnotherStreamTakesItsSlotsAlong) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Machine machine(3, 1, seed);
    machine.use(0);
    machine.compute->move_to(kB);
    machine.use(0);
    machine.write(0, kB);
    machine.use(1);  // evicts chunk 0, whose slot is of a's pool
    machine.scratch(kA);
    machine.scratch(kB);
    machine.manager->move_to_host();
    machine.streams.run_all();
    EXPECT_EQ(machine.wrong, 0) << "seed " << seed;
    EXPECT_TRUE(machine.host_storage_has_its_values()) << "seed " << seed;
  }
}

TEST(ChunkStreamsTest, ARecordedStreamHoldsASlotBack) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Machine machine(2, 1, seed);
    machine.use(0);
    machine.arena->record(machine.binder.addresses[0], kSide);
    machine.streams.order(kA, kSide);
    machine.read(0, kSide);
    machine.write(0, kSide);  // a collective in place
    machine.manager->evict(machine.chunk(0));
    machine.scratch(kA);
    machine.streams.run_all();
    EXPECT_EQ(machine.wrong, 0) << "seed " << seed;
    EXPECT_TRUE(machine.host_storage_has_its_values()) << "seed " << seed;
  }
}

TEST(ChunkStreamsTest, PromotedPayloadsAreBehindTheirUsers) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Machine machine(2, 3, seed);
    machine.manager->add_payload(machine.chunk(0), PayloadKind::kGrad, kBytes);
    ASSERT_TRUE(machine.manager->try_promote(machine.chunk(0)));
    const auto& gradient = machine.manager->payload(machine.chunk(0), PayloadKind::kGrad);
    std::byte* const data = gradient->data();
    machine.compute->move_to(kB);
    machine.streams.enqueue(kB, [data] { std::memset(data, 7, kBytes); });
    machine.arena->record(data, kSide);
    machine.streams.order(kB, kSide);
    machine.streams.enqueue(kSide, [data] { std::memset(data, 8, kBytes); });
    machine.use(0);
    machine.manager->demote(machine.chunk(0));
    machine.scratch(kA);
    machine.scratch(kB);
    machine.streams.run_all();
    EXPECT_EQ(machine.wrong, 0) << "seed " << seed;
    EXPECT_EQ(gradient->data()[0], std::byte{8}) << "seed " << seed;
    machine.manager->move_to_host();
  }
}

// What training does on a device that is shared: modules on any of three streams, in-place writes,
// side streams that were recorded, temporaries of every pool, evictions at any moment, and streams
// that take turns at random.
TEST(ChunkStreamsTest, AnyScheduleOfTheStreamsGivesTheSameValues) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Machine machine(5, 3, seed);
    std::mt19937 choose(seed + 1000);
    for (int event = 0; event < 120; ++event) {
      const std::size_t i = choose() % 5;
      const StreamId stream{1 + choose() % 3};
      switch (choose() % 8) {
        case 0: machine.compute->move_to(stream); break;
        case 1:
        case 2: machine.use(i); break;
        case 3:
          machine.use(i);
          for (const StreamId reader : {kA, kB, kSide}) {  // as in any program with streams
            machine.streams.order(reader, machine.compute->id());
          }
          machine.write(i, machine.compute->id());
          break;
        case 4:  // ahead
          if (machine.manager->make_room(kBytes, ~std::size_t{0})) {
            machine.manager->fetch(machine.chunk(i));
          }
          break;
        case 5:
          if (machine.manager->resident(machine.chunk(i))) {
            machine.manager->evict(machine.chunk(i));
          }
          break;
        case 6: machine.scratch(stream); break;
        case 7:
          if (machine.manager->bound(machine.chunk(i))) {
            machine.streams.order(machine.compute->id(), stream);
            machine.arena->record(machine.binder.addresses[i], stream);
            machine.read(i, stream);
          }
          break;
      }
      for (std::size_t steps = choose() % 6; steps > 0; --steps) {
        static_cast<void>(machine.streams.step());
      }
    }
    machine.manager->move_to_host();
    machine.streams.run_all();
    ASSERT_EQ(machine.wrong, 0) << "seed " << seed;
    ASSERT_TRUE(machine.host_storage_has_its_values()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace castor
