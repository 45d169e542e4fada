// Seeded random operations on all stores of a rank, against full vectors in memory that
// UpdateRule::update changes directly. Weights, gradients and states have equal bits afterwards, in
// every place and every format.
//
// Each test fixes two dimensions:
//   - types and state format: fp32; bf16 with fp32, split, split_bf16 and split_int8; fp16; bf16
//     beside fp32 in split and in split_int8;
//   - place of the weights: host memory; NVMe; memory of a device with kernels; full on 2 to 4
//     ranks; shared by ranks of one machine; sharded over ranks (ZeRO-3); full on ranks with
//     sharded gradients (ZeRO-2).
// The seed chooses the others:
//   - states in memory, on NVMe, or some of each; number of window buffers;
//   - 1 to 4 ranks, which are threads; 1 to 4 copies of sharded weights;
//   - a device with or without kernels of its own; chunks that are promoted to it and demoted; the
//     share of the host's updates that runs on it;
//   - sizes of parameters and chunks; parameters without elements, frozen ones, and ones that
//     another optimizer updates;
//   - threads of the executor.
// Operations:
//   - gradients written, as means or into copies that stay; updates of one chunk after another, on
//     one thread or two, or of all together, with different options for each parameter;
//   - loads of weights and states; states on NVMe discarded; weights edited through an address;
//   - a snapshot of weights and states that a thread reads while updates go on, from copies for
//     which there is room, and in place;
//   - states gathered from all ranks, by all or for one that the others serve.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "optim/rule_of_type.h"
#include "store/rank_states.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

constexpr unsigned kSeeds = 12;  // of each pair of format and place
constexpr int kOperations = 16;

using Bytes = std::vector<std::byte>;

struct Format {
  const char* name;
  ScalarType type;
  StateFormat format;
  bool beside_fp32 = false;
};
constexpr Format kFormats[] = {
    {"Float32", ScalarType::kFloat32, StateFormat::kFp32},
    {"BFloat16", ScalarType::kBFloat16, StateFormat::kFp32},
    {"BFloat16Split", ScalarType::kBFloat16, StateFormat::kSplit},
    {"BFloat16SplitBf16", ScalarType::kBFloat16, StateFormat::kSplitBf16},
    {"BFloat16SplitInt8", ScalarType::kBFloat16, StateFormat::kSplitInt8},
    {"Float16", ScalarType::kFloat16, StateFormat::kFp32},
    {"MixedSplit", ScalarType::kBFloat16, StateFormat::kSplit, true},
    {"MixedSplitInt8", ScalarType::kBFloat16, StateFormat::kSplitInt8, true}};

enum class Weights { kMemory, kNvme, kDevice, kFull, kShared, kSharded, kShardedGradients };
struct Place {
  const char* name;
  Weights weights;
};
constexpr Place kPlaces[] = {{"InMemory", Weights::kMemory},
                             {"OnNvme", Weights::kNvme},
                             {"OnDevice", Weights::kDevice},
                             {"FullOnRanks", Weights::kFull},
                             {"SharedByRanks", Weights::kShared},
                             {"ShardedOverRanks", Weights::kSharded},
                             {"WithShardedGradients", Weights::kShardedGradients}};

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}

  /// Returns a number below `end`.
  std::size_t below(std::size_t end) { return generator_() % end; }
  bool one_in(std::size_t count) { return below(count) == 0; }
  /// Returns finite values of the type.
  Bytes values(ScalarType type, std::size_t numel) {
    Bytes bytes(numel * size_of(type));
    for (std::size_t i = 0; i < numel; ++i) {
      const auto bits = static_cast<std::uint32_t>(generator_());
      const float value = static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-32f;
      if (type == ScalarType::kFloat32) {
        std::memcpy(bytes.data() + 4 * i, &value, 4);
      } else {
        // Any fp16 number between 2^-8 and 1, or a bf16 number.
        const auto half =
            type == ScalarType::kFloat16
                ? static_cast<std::uint16_t>((bits & 0x9fff) | 0x2000)
                : static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
        std::memcpy(bytes.data() + 2 * i, &half, 2);
      }
    }
    return bytes;
  }

 private:
  std::minstd_rand generator_;
};

/// A case, the same for every rank.
struct Case {
  Case(const Format& format, const Place& place, unsigned seed)
      : format(format), weights(place.weights), seed(seed), random(seed * 7919 + 17) {
    rule = adam(format.format);
    const bool one =
        weights == Weights::kMemory || weights == Weights::kNvme || weights == Weights::kDevice;
    ranks = one ? 1 : 2 + random.below(3);
    const std::size_t num_params = 1 + random.below(5);
    for (std::size_t i = 0; i < num_params; ++i) {
      const bool fp32 = format.beside_fp32 && random.one_in(2);
      const bool frozen = i > 0 && random.one_in(8);
      // Whole pages of shared host storage are forgotten where ranks have written them.
      const std::size_t most = weights == Weights::kShared && random.one_in(3) ? 6000 : 700;
      model.add(random.one_in(10) ? 0 : 1 + random.below(most),
                fp32 ? ScalarType::kFloat32 : format.type, !frozen, i == 0 || !random.one_in(10));
    }
    const std::size_t unit =
        std::max(param_alignment(rule.get(), format.type), kParamAlignment) * ranks;
    chunk_bytes = unit * (1 + random.below(4));
    copies = weights != Weights::kSharded || ranks == 3 ? 1
             : ranks == 2                               ? 1 + random.below(2)
                                                        : std::size_t{1} << random.below(3);
  }

  [[nodiscard]] StoreOptions options(const ChunkLayout& layout, const std::string& directory) {
    StoreOptions options;
    options.rule = rule;
    options.directory = directory;
    const std::size_t count = layout.chunks().size();
    const std::size_t stored_states = random.below(3);
    for (std::size_t i = 0; i < count; ++i) {
      const bool on_device = weights == Weights::kDevice && random.one_in(2);
      options.placements.push_back(on_device ? Placement::kDevice : Placement::kStream);
      options.states_on_nvme.push_back(!on_device && layout.chunks()[i].has_state &&
                                       (stored_states == 2 || (stored_states == 1 && i % 2 == 0)));
      options.weights_on_nvme.push_back(weights == Weights::kNvme && (i == 0 || !random.one_in(3)));
    }
    options.state_slots = 1 + random.below(3);
    options.weight_slots = StoredWeights::kLeastSlots + random.below(2);
    options.zero_stage = weights == Weights::kSharded            ? 3
                         : weights == Weights::kShardedGradients ? 2
                                                                 : 0;
    options.copies = copies;
    options.shares_host_storage = weights == Weights::kShared;
    const bool by_itself =
        weights == Weights::kDevice || (weights != Weights::kShared && random.one_in(3));
    options.device = by_itself ? Computes::kByItself : Computes::kOnHost;
    if (by_itself && !random.one_in(3)) {
      options.device_share = {.fraction = static_cast<double>(random.below(5)) / 4,
                              .adapts = random.one_in(2)};
    }
    options.num_threads = 1 + random.below(2);
    return options;
  }

  const Format format;
  const Weights weights;
  const unsigned seed;
  Random random;
  std::shared_ptr<const UpdateRule> rule;
  SmallModel model;
  std::size_t ranks = 1;
  std::size_t chunk_bytes = 0;
  std::size_t copies = 1;
};

/// Returns whether the layout has something for the ranks to shard.
bool can_run(const ChunkLayout& layout, Weights weights) {
  return weights != Weights::kShardedGradients ||
         std::any_of(layout.chunks().begin(), layout.chunks().end(),
                     [](const ChunkSpec& chunk) { return chunk.trainable; });
}

/// One parameter as one process has it that keeps everything in memory.
struct Model {
  Bytes weights;
  Bytes gradient;  // as an update takes it
  Bytes mean;      // of sharded gradients
  std::array<Bytes, kNumPayloadKinds> states;
  std::int64_t steps = 0;
};

class RankCase {
 public:
  RankCase(Case own, const std::string& directory, std::optional<RankGroups> ranks)
      : case_(std::move(own)), store_(make(case_, directory, ranks)), random_(case_.random) {
    if (ranks) {
      ranks_ = ranks->passes;
      consistency_ = std::make_unique<ConsistencyCheck>(*ranks_, layout_);
      rank_states_ = std::make_unique<RankStates>(*ranks_, *consistency_, layout_, store_.shards,
                                                  *store_.states);
    }
    own_random_ = Random(case_.seed * 31 + (ranks_ ? static_cast<unsigned>(ranks_->rank()) : 0));
    std::vector<std::uint64_t> streams;
    for (std::size_t i = 0; i < layout_.params().size(); ++i) {
      const ParamSpec& spec = layout_.params()[i];
      Model& model = models_.emplace_back();
      model.weights.resize(spec.numel * size_of(spec.type));
      model.gradient = model.mean = model.weights;
      for (const PayloadKind kind : kinds_of(param_id(i))) {
        state_of(model, kind).resize(store_.states->bytes(param_id(i), kind, spec.numel));
      }
      streams.push_back(i * 5 + 1);
    }
    streams_ = streams;
    store_.updates->set_rounding(case_.seed, std::move(streams));
  }
  ~RankCase() { end_snapshot(); }
  RankCase(const RankCase&) = delete;
  RankCase& operator=(const RankCase&) = delete;

  void run() {
    for (std::size_t i = 0; i < layout_.params().size(); ++i) {
      load_weights(param_id(i));
    }
    for (int i = 0; i < kOperations && !::testing::Test::HasFailure(); ++i) {
      operate();
      check(chunk_id(own_random_.below(layout_.chunks().size())));
    }
    end_snapshot();
    for (const ChunkId chunk : store_.chunks()) {
      check(chunk);
    }
    barrier_of_all();
    EXPECT_FALSE(store_.states->torn());
    const std::size_t copies = store_.gradient_shards ? store_.gradient_shards->copy_bytes() : 0;
    EXPECT_EQ(store_.host->ledger().used(), in_use_ + copies);
  }

 private:
  static TestStore make(Case& own, const std::string& directory,
                        const std::optional<RankGroups>& ranks) {
    ChunkLayout layout = own.model.layout(own.chunk_bytes, own.rule.get(), own.ranks);
    StoreOptions options = own.options(layout, directory);
    options.ranks = ranks;
    options.file_name = "rank-" + std::to_string(ranks ? ranks->passes->rank() : 0);
    return {std::move(layout), std::move(options)};
  }
  [[nodiscard]] const std::vector<PayloadKind>& kinds_of(ParamId param) const {
    return store_.states->kinds(layout_.place(param).chunk);
  }
  static Bytes& state_of(Model& model, PayloadKind kind) {
    return model.states[static_cast<std::size_t>(kind)];
  }
  [[nodiscard]] bool alone() const { return ranks_ == nullptr; }

  /// Waits for all ranks, so that none reads weights or means that another is about to change.
  void barrier_of_all() {
    if (case_.weights == Weights::kSharded) {
      store_.weights->await_reads();
      store_.sharded.shards()->await_exchanges();
    }
    if (!alone()) {
      barrier(*ranks_);
    }
  }

  void operate() {
    const ParamId param = param_id(random_.below(layout_.params().size()));
    switch (random_.below(14)) {
      case 0:
      case 1:
      case 2:
      case 3: return update_one_by_one();
      case 4:
      case 5:
      case 6: return update_together();
      case 7: return load_weights(param);
      case 8: return load_state(param);
      case 9: return discard_states();
      case 10: return reader_.joinable() ? end_snapshot() : begin_snapshot();
      case 11: return promote_or_demote(layout_.place(param).chunk);
      case 12: return alone() ? edit_weights(param) : gather_states(param);
      default: return read_gradients();
    }
  }

  [[nodiscard]] bool updated(ChunkId chunk) const { return layout_.chunk(chunk).has_state; }

  /// Gives some chunks new gradients, and returns the updates of these chunks.
  std::vector<std::vector<ParamUpdate>> new_updates() {
    std::vector<std::vector<ParamUpdate>> updates(layout_.chunks().size());
    barrier_of_all();
    for (const ChunkId chunk : store_.chunks()) {
      if (!updated(chunk) || random_.one_in(3)) {
        continue;
      }
      for (const ParamId param : layout_.chunk(chunk).params) {
        const ParamSpec& spec = layout_.param(param);
        if (!random_.one_in(4)) {
          Model& model = models_[index(param)];
          model.gradient = random_.values(spec.type, spec.numel);
          store_.write_gradient(param, model.gradient);
        }
        if (random_.one_in(5)) {
          continue;
        }
        RuleOptions options =
            adam_options(random_.one_in(6) ? 0.0 : 1e-2, random_.one_in(2) ? 0.0 : 0.1);
        options[5] = random_.one_in(3) ? 0.0 : 1.0;  // decoupled
        options[6] = random_.one_in(6) ? 1.0 : 0.0;  // maximize
        const double scale = random_.one_in(2) ? 1.0 : 0.5;
        updates[index(chunk)].push_back(
            store_.updates->update_of(param, options, models_[index(param)].steps + 1, scale));
        pending_.push_back({param, options, scale});
      }
    }
    barrier_of_all();
    for (const ChunkId chunk : store_.chunks()) {
      if (store_.gradients_sharded(chunk) && store_.gradient_shards->has_copy(chunk) &&
          !random_.one_in(3)) {
        store_.reduce_gradients(chunk);
        for (const ParamId param : layout_.chunk(chunk).params) {
          models_[index(param)].mean = models_[index(param)].gradient;
        }
      }
    }
    return updates;
  }
  /// Does the updates to the models, and drops copies of gradients that hide the mean.
  void finish_updates() {
    for (const auto& [param, options, scale] : std::exchange(pending_, {})) {
      update_model(param, options, scale);
    }
    for (const ChunkId chunk : store_.chunks()) {
      if (store_.gradients_sharded(chunk) && store_.gradient_shards->has_copy(chunk)) {
        store_.gradient_shards->drop_copy(chunk);
        for (const ParamId param : layout_.chunk(chunk).params) {
          models_[index(param)].gradient = models_[index(param)].mean;
        }
      }
    }
  }
  void update_model(ParamId param, const RuleOptions& options, double scale) {
    const ParamSpec& spec = layout_.param(param);
    Model& model = models_[index(param)];
    const std::int64_t step = ++model.steps;
    if (spec.numel == 0) {
      return;
    }
    const auto at = [&](PayloadKind kind) -> void* {
      Bytes& state = state_of(model, kind);
      return state.empty() ? nullptr : state.data();
    };
    UpdateSegment segment{.param = model.weights.data(),
                          .grad = model.gradient.data(),
                          .master = static_cast<float*>(at(kMasterPayload)),
                          .remainder = static_cast<std::int16_t*>(at(kRemainderPayload)),
                          .type = spec.type,
                          .numel = spec.numel,
                          .coefficients = case_.rule->coefficients(options, step, scale),
                          .rounding = RoundingKey(case_.seed, streams_[index(param)], step)};
    for (std::size_t i = 0; i < kMaxRuleStates; ++i) {
      segment.states[i] = at(rule_payload(i));
    }
    rule_of_type(*case_.rule, spec.type).update(inline_executor_, std::span(&segment, 1));
  }
  void update_one_by_one() {
    const auto updates = new_updates();
    std::vector<ChunkId> order = store_.chunks();
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[random_.below(i)]);
    }
    store_.states->announce(order);
    const auto update_from = [&](std::size_t first, std::size_t stride) {
      for (std::size_t i = first; i < order.size(); i += stride) {
        if (!updates[index(order[i])].empty()) {
          store_.update(order[i], updates[index(order[i])]);
        }
      }
    };
    if (alone() && random_.one_in(2)) {
      const std::jthread half([&] { update_from(1, 2); });
      update_from(0, 2);
    } else {
      update_from(0, 1);
    }
    finish_updates();
  }
  void update_together() {
    const auto updates = new_updates();
    std::size_t expected = 0;
    for (std::size_t i = 0; i < updates.size(); ++i) {
      if (!updates[i].empty()) {
        store_.updates->begin(chunk_id(i));
        ++expected;
      }
    }
    std::size_t num_begun = 0;
    store_.updates->run_all(updates, num_begun);
    EXPECT_EQ(num_begun, expected);
    finish_updates();
  }

  void load_weights(ParamId param) {
    const ParamSpec& spec = layout_.param(param);
    models_[index(param)].weights = random_.values(spec.type, spec.numel);
    store_.reads.wait(layout_.place(param).chunk);
    barrier_of_all();
    store_.write_weights(param, models_[index(param)].weights);
    if (!alone()) {
      barrier(*ranks_);
    }
  }
  // An operator writes through the address that it is given.
  void edit_weights(ParamId param) {
    const ParamPlace place = layout_.place(param);
    if (!store_.manager->stored(place.chunk)) {
      return load_weights(param);
    }
    const ParamSpec& spec = layout_.param(param);
    models_[index(param)].weights = random_.values(spec.type, spec.numel);
    store_.reads.wait(place.chunk);
    const WeightUse use{.part = store_.weights->parameters_of(place.chunk), .writes = true};
    const auto visit = store_.weights->visit(std::span(&use, 1));
    std::ranges::copy(models_[index(param)].weights,
                      store_.params.address(place.chunk) + place.offset * size_of(spec.type));
  }
  void load_state(ParamId param) {
    const auto& kinds = kinds_of(param);
    if (kinds.empty()) {
      return;
    }
    const PayloadKind kind = kinds[random_.below(kinds.size())];
    Bytes& state = state_of(models_[index(param)], kind);
    // Floats where the state has them; masters and remainders may be anything finite.
    if (kind == kRemainderPayload || case_.format.format == StateFormat::kSplitInt8) {
      std::ranges::fill(state, std::byte{0});
    } else {
      const bool bf16 = kind != kMasterPayload && case_.format.format == StateFormat::kSplitBf16;
      const ScalarType type = bf16 ? ScalarType::kBFloat16 : ScalarType::kFloat32;
      state = random_.values(type, state.size() / size_of(type));
      if (kind == rule_payload(1)) {  // exp_avg_sq is not negative
        for (std::size_t i = size_of(type) - 1; i < state.size(); i += size_of(type)) {
          state[i] &= std::byte{0x7f};
        }
      }
    }
    store_.reads.wait(layout_.place(param).chunk);
    const auto piece = piece_of(state, param, kind);
    store_.write_state(param, kind, piece);
  }
  [[nodiscard]] Bytes piece_of(const Bytes& full, ParamId param, PayloadKind kind) const {
    const Piece piece = store_.shards.piece(param);
    const std::byte* const first =
        full.data() + store_.states->bytes(param, kind, piece.first_element);
    return {first, first + store_.states->bytes(param, kind, piece.numel)};
  }
  void discard_states() {
    store_.reads.wait_for_all();
    store_.states->discard_stored();
    for (std::size_t i = 0; i < models_.size(); ++i) {
      if (store_.states->stored(layout_.place(param_id(i)).chunk)) {
        for (Bytes& state : models_[i].states) {
          std::ranges::fill(state, std::byte{0});
        }
      }
    }
  }
  void promote_or_demote(ChunkId chunk) {
    if (store_.states->partly_stored(chunk) || store_.states->sharded(chunk) ||
        store_.options.placements[index(chunk)] == Placement::kDevice) {
      return;
    }
    store_.reads.wait(chunk);
    barrier_of_all();
    if (store_.manager->promoted(chunk)) {
      store_.manager->demote(chunk);
      store_.manager->evict(chunk);
    } else {
      EXPECT_TRUE(store_.manager->try_promote(chunk));
    }
    barrier_of_all();
  }
  void gather_states(ParamId param) {
    const auto& kinds = kinds_of(param);
    if (kinds.empty()) {
      return;
    }
    const PayloadKind kind = kinds[random_.below(kinds.size())];
    const std::size_t reader = random_.below(case_.ranks + 1);
    if (reader == ranks_->rank() || reader == case_.ranks) {
      EXPECT_EQ(rank_states_->read(param, kind), state_of(models_[index(param)], kind));
      if (reader != case_.ranks) {
        rank_states_->end_service();
      }
    } else {
      rank_states_->serve();
    }
  }
  void read_gradients() {
    std::vector<ChunkId> stored;
    for (const ChunkId chunk : store_.chunks()) {
      if (store_.manager->gradients_stored(chunk) && layout_.chunk(chunk).trainable) {
        stored.push_back(chunk);
      }
    }
    if (!stored.empty()) {
      store_.weights->read_gradients(stored, [&](ChunkId chunk, const std::byte* gradients) {
        for (const ParamId param : layout_.chunk(chunk).params) {
          const Bytes& expected = models_[index(param)].gradient;
          const std::byte* const first =
              gradients + layout_.place(param).offset * size_of(layout_.param(param).type);
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), first));
        }
      });
    }
  }

  void begin_snapshot() {
    end_snapshot();
    store_.reads.begin();
    const bool states = !random_.one_in(4);
    const std::size_t most = random_.below(5) * case_.chunk_bytes;
    EXPECT_LE(store_.copies->begin(store_.chunks(), states, most), most);
    reader_ = std::thread([this, states, expected = models_] { read_snapshot(states, expected); });
  }
  void end_snapshot() {
    if (reader_.joinable()) {
      reader_.join();
      store_.copies->end();
    }
  }
  // On a thread of its own.
  void read_snapshot(bool states, const std::vector<Model>& expected) {
    for (const ChunkId chunk : store_.chunks()) {
      const bool copied = store_.copies->finish(chunk);
      EXPECT_EQ(copied, store_.copies->has(chunk));
      if (copied) {
        store_.reads.end(chunk);
      }
      for (const ParamId param : layout_.chunk(chunk).params) {
        const Model& model = expected[index(param)];
        const auto read = [&](PayloadKind kind) {
          if (copied) {
            const ChunkCopies::Bytes bytes = store_.copies->piece(param, kind);
            return Bytes(bytes.data.get(), bytes.data.get() + bytes.size);
          }
          return kind == PayloadKind::kParam ? own_weights(param) : store_.read_state(param, kind);
        };
        EXPECT_TRUE(read(PayloadKind::kParam) ==
                    piece_of(model.weights, param, PayloadKind::kParam))
            << "snapshot of parameter " << index(param);
        for (std::size_t i = 0; i < kinds_of(param).size() && states; ++i) {
          const PayloadKind kind = kinds_of(param)[i];
          EXPECT_TRUE(read(kind) ==
                      piece_of(model.states[static_cast<std::size_t>(kind)], param, kind))
              << "snapshot of parameter " << index(param) << "'s " << store_.states->name_of(kind);
        }
      }
      if (!copied) {
        store_.reads.end(chunk);
      }
    }
  }
  /// Returns this rank's piece, without asking others.
  [[nodiscard]] Bytes own_weights(ParamId param) const {
    const Piece piece = store_.shards.piece(param);
    if (piece.numel == 0) {
      return {};
    }
    const ParamPlace place = layout_.place(param);
    const std::size_t size = size_of(layout_.param(param).type);
    if (store_.states->sharded(place.chunk)) {
      const std::byte* const first =
          store_.sharded.shards()->shard(place.chunk).data() +
          (place.offset + piece.first_element - store_.shards.first(place.chunk)) * size;
      return {first, first + piece.numel * size};
    }
    return piece_of(store_.read_weights(param), param, PayloadKind::kParam);
  }

  void check(ChunkId chunk) {
    for (const ParamId param : layout_.chunk(chunk).params) {
      const Model& model = models_[index(param)];
      EXPECT_TRUE(store_.read_weights(param) == model.weights) << "parameter " << index(param);
      if (updated(chunk) && own_random_.one_in(3)) {
        EXPECT_TRUE(store_.read_gradient(param) == model.gradient)
            << "gradient of parameter " << index(param);
      }
      for (const PayloadKind kind : kinds_of(param)) {
        EXPECT_TRUE(store_.read_state(param, kind) ==
                    piece_of(model.states[static_cast<std::size_t>(kind)], param, kind))
            << "parameter " << index(param) << "'s " << store_.states->name_of(kind);
      }
    }
  }

  struct Pending {
    ParamId param;
    RuleOptions options;
    double scale;
  };

  Case case_;
  TestStore store_;
  const ChunkLayout& layout_ = store_.layout;
  Random random_;         // the same on every rank
  Random own_random_{0};  // of this rank
  std::shared_ptr<Collectives> ranks_;
  std::unique_ptr<ConsistencyCheck> consistency_;
  std::unique_ptr<RankStates> rank_states_;
  std::vector<Model> models_;
  std::vector<std::uint64_t> streams_;
  std::vector<Pending> pending_;
  const std::size_t in_use_ = store_.host->ledger().used();
  InlineExecutor inline_executor_;
  std::thread reader_;
};

class StoresModelTest : public ::testing::TestWithParam<std::tuple<Format, Place>> {};

void run_case(const Case& own, const std::string& directory) {
  if (own.ranks == 1) {
    RankCase(own, directory, std::nullopt).run();
    return;
  }
  ThreadMessages messages(own.ranks);
  ThreadRanks ranks(own.ranks, own.seed, std::chrono::microseconds(0));
  ranks.run([&](Collectives& rank) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                       "rank " + std::to_string(rank.rank()) + " of " +
                                           std::to_string(own.ranks) + ", seed " +
                                           std::to_string(own.seed));
    RankCase(own, directory, groups_of(rank, &messages)).run();
  });
  EXPECT_EQ(ranks.failures(), std::vector<std::string>(own.ranks));
}

TEST_P(StoresModelTest, AllPlacesHaveTheBitsOfUpdatesInMemory) {
  const auto& [format, place] = GetParam();
  const test::TempDirectory directory("/dev/shm");
  for (unsigned seed = 0; seed < kSeeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case own(format, place, seed);
    if (can_run(own.model.layout(own.chunk_bytes, own.rule.get(), own.ranks), own.weights)) {
      run_case(own, directory.string());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, StoresModelTest,
                         ::testing::Combine(::testing::ValuesIn(kFormats),
                                            ::testing::ValuesIn(kPlaces)),
                         [](const auto& grid) {
                           return std::string(std::get<0>(grid.param).name) +
                                  std::get<1>(grid.param).name;
                         });

}  // namespace
}  // namespace castor::testing
