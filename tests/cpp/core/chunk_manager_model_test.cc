// A seeded random walk over the chunk manager against a model that is too simple to be wrong: what
// is resident or promoted, in which order chunks leave, which bytes every parameter reads, and what
// was copied.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_manager.h"
#include "core/error.h"
#include "core/fakes.h"
#include "core/tensor_state.h"

namespace castor {
namespace {

using testing::chunk_id;
using testing::InjectedFailure;
using testing::Net;
using testing::param_id;
using testing::Rig;

constexpr std::size_t kNoCap = ~std::size_t{0};

struct Adversary {
  const char* name;
  unsigned seed;
  std::size_t operations;
  bool copies_fail;
  bool stored = false;  // host storage of some chunks, whose reads fail where copies do
};

void PrintTo(const Adversary& adversary, std::ostream* out) { *out << adversary.name; }

ChunkLayout make_layout() {
  Net net;
  for (int i = 0; i < 5; ++i) {
    net.add({16, 16, 16, 16});  // a full chunk
    net.add({48, 48});          // two chunks that are not quite full
    net.add({100});             // an oversized parameter
    net.add({0, 16});
  }
  return net.layout();
}

class Walk {
 public:
  explicit Walk(const Adversary& adversary)
      : adversary_(adversary),
        random_(adversary.seed),
        placements_(some_placements()),
        stored_(adversary.stored ? some_stored() : std::vector<bool>()),
        rig_(make_layout(), device_bytes(), placements_, stored_),
        chunks_(rig_.layout.chunks().size()),
        values_(rig_.layout.params().size()),
        states_(rig_.layout.params().size(), TensorState::kFree) {
    for (std::size_t i = 0; i < chunks_.size(); i += 2) {
      rig_.manager->add_payload(chunk_id(i), state_payload(0), used(chunk_id(i)));
    }
    for (std::size_t i = 0; i < values_.size(); ++i) {
      values_[i] = Rig::initial(i);
      if (on_device(rig_.layout.place(param_id(i)).chunk)) {
        states_[i] = TensorState::kHold;
      }
    }
  }

  void run() {
    for (std::size_t i = 0; i < adversary_.operations; ++i) {
      if (adversary_.copies_fail && below(20) == 0) {
        fail_soon();
      }
      operate();
      check(i % 1000 == 0);
      if (::testing::Test::HasFailure()) {
        FAIL() << "seed " << adversary_.seed << ", operation " << i << ": " << last_;
      }
    }
    rig_.engine.never_fail();
    rig_.store.never_fail();
    pins_.clear();
    rig_.manager.reset();
    EXPECT_EQ(rig_.engine.num_pending(), 0u);
    for (std::size_t i = 0; i < values_.size(); ++i) {
      EXPECT_TRUE(rig_.host_storage_holds(param_id(i), values_[i])) << "parameter " << i;
    }
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      EXPECT_TRUE(rig_.bound_to_host(chunk_id(i)));
    }
  }

 private:
  struct ModelChunk {
    bool resident = false;
    bool bound = false;
    bool dirty = false;  // written since the last snapshot
    bool promoted = false;
    std::uint32_t pins = 0;
    std::uint64_t next_use = kNeverUsed;
  };

  std::size_t below(std::size_t bound) { return random_() % bound; }

  static std::vector<Placement> some_placements() {
    const ChunkLayout layout = make_layout();
    std::vector<Placement> placements(layout.chunks().size(), Placement::kStream);
    placements[3] = Placement::kKeep;
    placements[7] = Placement::kDevice;
    return placements;
  }
  // Of every placement that leaves a chunk's storage on the host.
  static std::vector<bool> some_stored() {
    std::vector<bool> stored(make_layout().chunks().size());
    for (std::size_t i = 0; i < stored.size(); ++i) {
      stored[i] = i % 3 == 0;
    }
    return stored;
  }
  void fail_soon() {
    const std::size_t call = 1 + below(3);
    switch (below(adversary_.stored ? 4 : 2)) {
      case 0: return rig_.engine.fail_submit(call);
      case 1: return rig_.engine.fail_wait(call);
      case 2: return rig_.store.fail_lease(call);
      default: return rig_.store.fail_wait(call);
    }
  }
  // A third of the model beside what lives on the device.
  static std::size_t device_bytes() {
    const ChunkLayout layout = make_layout();
    return layout.used_bytes() / 3 + layout.chunk(chunk_id(7)).used_bytes;
  }

  [[nodiscard]] bool on_device(ChunkId chunk) const {
    return placements_[index(chunk)] == Placement::kDevice || chunks_[index(chunk)].promoted;
  }
  ModelChunk& model(ChunkId chunk) { return chunks_[index(chunk)]; }
  [[nodiscard]] std::size_t capacity(ChunkId chunk) const {
    return rig_.layout.chunk(chunk).capacity_bytes;
  }
  [[nodiscard]] std::size_t used(ChunkId chunk) const {
    return rig_.layout.chunk(chunk).used_bytes;
  }
  [[nodiscard]] std::size_t moments(ChunkId chunk) const {
    return index(chunk) % 2 == 0 ? used(chunk) : 0;
  }
  [[nodiscard]] std::size_t whole(ChunkId chunk) const { return capacity(chunk) + moments(chunk); }
  [[nodiscard]] std::size_t available() const {
    std::size_t taken = slots();
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      taken += chunks_[i].promoted      ? whole(chunk_id(i))
               : on_device(chunk_id(i)) ? used(chunk_id(i))
                                        : 0;
    }
    return rig_.device->ledger().budget() - taken;
  }
  [[nodiscard]] std::size_t slots() const {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      bytes += chunks_[i].resident ? capacity(chunk_id(i)) : 0;
    }
    return bytes;
  }
  [[nodiscard]] std::size_t pinned() const {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      bytes += chunks_[i].resident && chunks_[i].pins > 0 ? capacity(chunk_id(i)) : 0;
    }
    return bytes;
  }

  void model_leaves(ChunkId chunk) {
    ModelChunk& entry = model(chunk);
    if (entry.bound && entry.dirty) {
      d2h_bytes_ += rig_.layout.chunk(chunk).used_bytes;
    }
    entry.resident = entry.bound = false;
    for (const ParamId param : rig_.layout.chunk(chunk).params) {
      if (states_[index(param)] != TensorState::kReadyForReduce) {
        states_[index(param)] = TensorState::kFree;
      }
    }
  }
  void model_arrives(ChunkId chunk) {
    ModelChunk& entry = model(chunk);
    entry.resident = true;
    entry.dirty = false;
    h2d_bytes_ += rig_.layout.chunk(chunk).used_bytes;
    for (const ParamId param : rig_.layout.chunk(chunk).params) {
      if (states_[index(param)] != TensorState::kReadyForReduce) {
        states_[index(param)] = TensorState::kHold;
      }
    }
  }
  bool model_makes_room(std::size_t bytes, std::size_t cap, std::uint64_t horizon) {
    while ((cap != kNoCap && slots() + bytes > cap) || available() < bytes) {
      std::optional<std::size_t> victim;
      for (std::size_t i = 0; i < chunks_.size(); ++i) {
        const ModelChunk& entry = chunks_[i];
        if (entry.resident && entry.pins == 0 && placements_[i] == Placement::kStream &&
            entry.next_use >= horizon && (!victim || entry.next_use > chunks_[*victim].next_use)) {
          victim = i;
        }
      }
      if (!victim) {
        break;
      }
      model_leaves(chunk_id(*victim));
      ++evictions_;
    }
    return available() >= bytes;
  }

  // After a failed copy the model takes over what is resident, and nothing else: no byte that
  // somebody wrote may be lost.
  void follow() {
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const ChunkId chunk = chunk_id(i);
      if (on_device(chunk)) {
        continue;
      }
      ModelChunk& entry = chunks_[i];
      const bool resident = rig_.manager->resident(chunk);
      EXPECT_TRUE(resident || entry.pins == 0) << "a pinned chunk left";
      entry.resident = resident;
      entry.bound = !rig_.bound_to_host(chunk);
      for (const ParamId param : rig_.layout.chunk(chunk).params) {
        if (states_[index(param)] != TensorState::kReadyForReduce && !resident) {
          states_[index(param)] = TensorState::kFree;
        } else if (states_[index(param)] == TensorState::kFree) {
          states_[index(param)] = rig_.manager->state(param);
        }
      }
    }
    const TransferCounts& counts = rig_.manager->counts();
    h2d_bytes_ = counts.h2d_bytes;
    d2h_bytes_ = counts.d2h_bytes;
    evictions_ = counts.evictions;
  }

  template <typename Error, typename Call>
  void expect_refusal(Call&& call) {
    EXPECT_THROW(call(), Error) << last_;
  }

  void operate() {
    const ChunkId chunk = chunk_id(below(chunks_.size()));
    last_ = "chunk " + std::to_string(index(chunk));
    try {
      switch (below(12)) {
        case 0:
        case 1: return fetch(chunk);
        case 2: return pin(chunk);
        case 3: return unpin();
        case 4: return below(3) == 0 ? evict(chunk) : unpin();
        case 5: return make_room();
        case 6: return set_next_use(chunk);
        case 7: return set_state();
        case 8: return write();
        case 9: return promote(chunk);
        case 10: return below(2) == 0 ? demote(chunk) : demote_one();
        default: return below(200) == 0 ? move_to_host() : use(chunk);
      }
    } catch (const InjectedFailure&) {
      EXPECT_TRUE(adversary_.copies_fail);
      follow();
    }
  }

  void fetch(ChunkId chunk) {
    last_ += " fetch";
    if (!on_device(chunk) && !model(chunk).resident && capacity(chunk) > available()) {
      return expect_refusal<OutOfMemory>([&] { rig_.manager->fetch(chunk); });
    }
    rig_.manager->fetch(chunk);
    if (!on_device(chunk) && !model(chunk).resident) {
      model_arrives(chunk);
    }
  }

  void pin(ChunkId chunk) {
    last_ += " pin";
    if (!on_device(chunk) && !model(chunk).resident) {
      return expect_refusal<UsageError>([&] { (void)rig_.manager->pin(chunk); });
    }
    pins_.emplace_back(chunk, rig_.manager->pin(chunk));
    ModelChunk& entry = model(chunk);
    if (!on_device(chunk) && !entry.bound) {
      entry.bound = true;
      if (entry.dirty) {
        h2d_bytes_ += rig_.layout.chunk(chunk).used_bytes;
        entry.dirty = false;
      }
    }
    ++entry.pins;
  }

  // COMPUTE is for pinned chunks, as the runtime has it.
  void unpin() {
    if (pins_.empty()) {
      return;
    }
    std::swap(pins_[below(pins_.size())], pins_.back());
    const ChunkId chunk = pins_.back().first;
    last_ = "unpin of chunk " + std::to_string(index(chunk));
    if (--model(chunk).pins == 0) {
      for (const ParamId param : rig_.layout.chunk(chunk).params) {
        if (states_[index(param)] == TensorState::kCompute) {
          states_[index(param)] = TensorState::kHold;
          rig_.manager->set_state(param, TensorState::kHold);
        }
      }
    }
    pins_.pop_back();
  }

  void evict(ChunkId chunk) {
    last_ += " evict";
    const ModelChunk& entry = model(chunk);
    if (on_device(chunk) || !entry.resident || entry.pins > 0) {
      return expect_refusal<UsageError>([&] { rig_.manager->evict(chunk); });
    }
    rig_.manager->evict(chunk);
    model_leaves(chunk);
    ++evictions_;
  }

  void promote(ChunkId chunk) {
    last_ += " promote";
    ModelChunk& entry = model(chunk);
    if (placements_[index(chunk)] != Placement::kStream || entry.promoted || entry.resident ||
        rig_.manager->stored(chunk)) {
      return expect_refusal<UsageError>([&] { (void)rig_.manager->try_promote(chunk); });
    }
    const bool fits = whole(chunk) <= available();
    EXPECT_EQ(rig_.manager->try_promote(chunk), fits);
    if (fits) {
      model_arrives(chunk);
      entry.resident = false;
      entry.promoted = true;
      h2d_bytes_ += moments(chunk);
    }
  }

  void model_demotes(ChunkId chunk) {
    ModelChunk& entry = model(chunk);
    entry.promoted = entry.dirty = false;
    entry.resident = entry.bound = true;
    d2h_bytes_ += used(chunk) + moments(chunk);
  }

  void demote(ChunkId chunk) {
    last_ += " demote";
    if (!model(chunk).promoted) {
      return expect_refusal<UsageError>([&] { rig_.manager->demote(chunk); });
    }
    rig_.manager->demote(chunk);
    model_demotes(chunk);
  }

  void demote_one() {
    last_ = "demote_one";
    std::optional<std::size_t> victim;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const auto rank = [](const ModelChunk& entry) {
        return std::pair(entry.pins == 0, entry.next_use);
      };
      if (chunks_[i].promoted && (!victim || rank(chunks_[i]) > rank(chunks_[*victim]))) {
        victim = i;
      }
    }
    EXPECT_EQ(rig_.manager->demote_one(), victim.has_value());
    if (victim) {
      model_demotes(chunk_id(*victim));
    }
  }

  void make_room() {
    last_ = "make_room";
    const std::size_t bytes = below(1200);
    const std::size_t cap = below(2) == 0 ? kNoCap : below(rig_.device->ledger().budget());
    const std::uint64_t horizon = below(2) == 0 ? 0 : below(64);
    const bool fits = rig_.manager->make_room(bytes, cap, horizon);
    EXPECT_EQ(fits, model_makes_room(bytes, cap, horizon));
  }

  // What the runtime does: make room, fetch, pin.
  void use(ChunkId chunk) {
    last_ += " use";
    if (on_device(chunk) || model(chunk).resident) {
      return pin(chunk);
    }
    const bool fits = rig_.manager->make_room(capacity(chunk), kNoCap);
    EXPECT_EQ(fits, model_makes_room(capacity(chunk), kNoCap, 0));
    if (fits) {
      fetch(chunk);
      pin(chunk);
    }
  }

  void set_next_use(ChunkId chunk) {
    last_ += " set_next_use";
    const std::uint64_t next_use = below(6) == 0 ? kNeverUsed : below(64);
    rig_.manager->set_next_use(chunk, next_use);
    model(chunk).next_use = next_use;
  }

  void set_state() {
    const ParamId param = param_id(below(states_.size()));
    const auto to = static_cast<TensorState>(below(kNumTensorStates));
    const TensorState from = states_[index(param)];
    const ChunkId chunk = rig_.layout.place(param).chunk;
    last_ = "set_state of parameter " + std::to_string(index(param));
    if (from != to && !can_transition(from, to)) {
      return expect_refusal<UsageError>([&] { rig_.manager->set_state(param, to); });
    }
    // States that speak of residency keep to it.
    const bool resident = on_device(chunk) || model(chunk).resident;
    if (to == TensorState::kCompute
            ? model(chunk).pins == 0
            : to != TensorState::kReadyForReduce && resident == (to == TensorState::kFree)) {
      return;
    }
    rig_.manager->set_state(param, to);
    states_[index(param)] = to;
  }

  void write() {
    const std::size_t param = below(values_.size());
    last_ = "write to parameter " + std::to_string(param);
    const auto value = static_cast<std::uint8_t>(below(256));
    rig_.write(param_id(param), value);
    values_[param] = value;
    model(rig_.layout.place(param_id(param)).chunk).dirty = true;
  }

  void move_to_host() {
    last_ = "move_to_host";
    while (!pins_.empty()) {
      unpin();
    }
    rig_.manager->move_to_host();
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      if (chunks_[i].resident) {
        model_leaves(chunk_id(i));
      }
    }
  }

  void check(bool thorough) {
    const ChunkManager& manager = *rig_.manager;
    EXPECT_EQ(manager.slot_bytes(), slots());
    EXPECT_EQ(manager.pinned_bytes(), pinned());
    EXPECT_EQ(rig_.device->ledger().available(), available());
    EXPECT_EQ(manager.counts().h2d_bytes, h2d_bytes_);
    EXPECT_EQ(manager.counts().d2h_bytes, d2h_bytes_);
    EXPECT_EQ(manager.counts().evictions, evictions_);
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const ChunkId chunk = chunk_id(i);
      EXPECT_EQ(manager.resident(chunk), chunks_[i].resident || on_device(chunk));
      EXPECT_EQ(manager.pins(chunk), chunks_[i].pins);
      EXPECT_EQ(rig_.bound_to_host(chunk), !chunks_[i].bound);
      EXPECT_EQ(rig_.store.num_leases(chunk),
                manager.stored(chunk) && chunks_[i].resident && !chunks_[i].bound ? 1 : 0)
          << "chunk " << i << " is held while it is copied in, and at no other time";
    }
    const std::size_t sample = below(values_.size());
    const bool failures_wait = adversary_.stored && adversary_.copies_fail;
    EXPECT_TRUE(failures_wait || rig_.reads(param_id(sample), values_[sample]))
        << "parameter " << sample;
    EXPECT_EQ(manager.state(param_id(sample)), states_[sample]);
    if (!thorough) {
      return;
    }
    rig_.expect_consistent();
    rig_.store.never_fail();
    for (std::size_t i = 0; i < values_.size(); ++i) {
      EXPECT_TRUE(rig_.reads(param_id(i), values_[i])) << "parameter " << i;
      EXPECT_EQ(manager.state(param_id(i)), states_[i]) << "parameter " << i;
    }
  }

  const Adversary adversary_;
  std::mt19937 random_;
  const std::vector<Placement> placements_;
  const std::vector<bool> stored_;
  Rig rig_;
  std::vector<std::pair<ChunkId, Pin>> pins_;
  std::vector<ModelChunk> chunks_;
  std::vector<std::uint8_t> values_;  // what each parameter must read
  std::vector<TensorState> states_;
  std::uint64_t h2d_bytes_ = 0;
  std::uint64_t d2h_bytes_ = 0;
  std::uint64_t evictions_ = 0;
  std::string last_;
};

class ChunkManagerModelTest : public ::testing::TestWithParam<Adversary> {};

TEST_P(ChunkManagerModelTest, BehavesAsTheModel) { Walk(GetParam()).run(); }

INSTANTIATE_TEST_SUITE_P(Random, ChunkManagerModelTest,
                         ::testing::Values(Adversary{"delayed_1", 1, 350'000, false},
                                           Adversary{"delayed_2", 2, 350'000, false},
                                           Adversary{"failing_3", 3, 200'000, true},
                                           Adversary{"failing_4", 4, 200'000, true},
                                           Adversary{"stored_5", 5, 200'000, false, true},
                                           Adversary{"stored_failing_6", 6, 200'000, true, true}),
                         [](const ::testing::TestParamInfo<Adversary>& info) {
                           return std::string(info.param.name);
                         });

}  // namespace
}  // namespace castor
