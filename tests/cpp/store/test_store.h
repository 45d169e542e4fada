#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/fakes.h"
#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "io/scoped_faults.h"
#include "io/test_support.h"
#include "parallel/thread_executor.h"
#include "store/chunk_copies.h"
#include "store/chunk_updates.h"
#include "store/fake_device.h"
#include "store/gradient_shards.h"
#include "store/rank_host_storage.h"
#include "store/recording_follower.h"
#include "store/sharded_host_storage.h"
#include "store/small_model.h"
#include "store/state_store.h"
#include "store/storage_plan.h"
#include "store/stored_weights.h"

// All stores of one rank, put together as a session does it (csrc/torch/session.cc).
namespace castor::testing {

struct StoreOptions {
  std::shared_ptr<const UpdateRule> rule = adam();
  std::vector<Placement> placements;  // empty: all stream
  std::vector<bool> states_on_nvme;   // per chunk; empty: none
  std::vector<bool> weights_on_nvme;
  std::size_t state_slots = 3;
  std::size_t weight_slots = StoredWeights::kLeastSlots;
  std::string directory;  // of the scratch file
  std::string file_name = "castor.scratch";
  std::size_t zero_stage = 0;  // 2 or 3: sharded
  std::size_t copies = 1;
  bool shares_host_storage = false;  // between the ranks
  std::optional<RankGroups> ranks;
  Computes device = Computes::kOnHost;
  std::size_t host_bytes = std::size_t{1} << 30;
  std::size_t device_bytes = std::size_t{1} << 30;
  std::size_t num_threads = 1;
  std::optional<DeviceShare> device_share;  // nullopt: the host updates what is in its memory
};

/// Returns the bytes of so many floats of one value.
inline std::vector<std::byte> filled_with(float value, std::size_t numel) {
  std::vector<std::byte> bytes(sizeof(float) * numel);
  for (std::size_t i = 0; i < numel; ++i) {
    std::memcpy(bytes.data() + sizeof(float) * i, &value, sizeof(float));
  }
  return bytes;
}

/// The groups of one rank of a test that calls all of them on one thread.
inline RankGroups groups_of(Collectives& rank, ThreadMessages* messages = nullptr) {
  const std::shared_ptr<Collectives> all(&rank, [](Collectives*) {});
  return {.passes = all,
          .gradients = all,
          .updates = all,
          .reads = messages == nullptr ? nullptr : messages->of_rank(rank.rank()),
          .link = "threads"};
}

/// The stores of one rank. Contents of parameters, gradients and states begin as zeros.
struct TestStore {
  ChunkLayout layout;
  const StoreOptions options;
  ShardMap shards;
  std::shared_ptr<FakeDevice> backend;
  SessionDevice device;
  std::shared_ptr<MemoryTier> device_tier;
  std::shared_ptr<MemoryTier> host;
  RecordingFollower params;
  RecordingFollower gradients;
  std::unique_ptr<RankHostStorage> shared;
  ThreadExecutor executor;
  ShardedHostStorage sharded;
  std::unique_ptr<NvmeTier> nvme;
  std::unique_ptr<CopyEngine> engine;
  FakeBinder binder;
  std::unique_ptr<GradientShards> gradient_shards;
  std::unique_ptr<StoredWeights> weights;
  std::unique_ptr<ChunkManager> manager;
  std::unique_ptr<StateStore> states;
  std::unique_ptr<RankWeights> rank_weights;
  std::unique_ptr<ChunkCopies> copies;
  ChunkReads reads;
  std::unique_ptr<DeviceUpdates> device_updates;
  std::unique_ptr<ChunkUpdates> updates;

  TestStore(ChunkLayout model, StoreOptions given)
      : layout(std::move(model)),
        options(with_defaults(std::move(given), layout.chunks().size())),
        shards(layout, options.ranks ? options.ranks->passes->rank() : 0),
        backend(std::make_shared<FakeDevice>(options.device)),
        device(backend),
        device_tier(std::make_shared<MemoryTier>(TierKind::kDevice, options.device_bytes,
                                                 backend->make_device_arena(), device.stream())),
        host(std::make_shared<MemoryTier>(TierKind::kHost, options.host_bytes,
                                          backend->make_host_arena())),
        executor(options.num_threads),
        engine(backend->make_copy_engine()),
        binder(layout),
        reads(layout.chunks().size(), [this](ChunkId chunk) { return copies->finish(chunk); }) {
    const std::size_t count = layout.chunks().size();
    make_shared_storage();
    make_nvme();
    if (sharded.shards() != nullptr) {
      gradient_shards =
          std::make_unique<GradientShards>(layout, *sharded.shards(), host, 0, gradients);
    }
    make_weights();
    manager = std::make_unique<ChunkManager>(layout, options.placements, device_tier, host, *engine,
                                             binder, weights.get(),
                                             shared ? shared->weights().tier : nullptr);
    for (std::size_t i = 0; i < count; ++i) {
      const ChunkSpec& spec = layout.chunks()[i];
      if (spec.trainable && !gradients_sharded(chunk_id(i))) {
        manager->add_payload(
            chunk_id(i), PayloadKind::kGrad, spec.used_bytes, {},
            shared && spec.updated_in_shards() ? shared->gradients().tier : nullptr);
      }
    }
    states = std::make_unique<StateStore>(*manager, shards, options.rule, options.states_on_nvme,
                                          nvme ? nvme->stream(StoragePlan::kStates) : nullptr,
                                          weights.get(),
                                          shared ? shared->weights().storage.get() : nullptr,
                                          sharded.shards(), gradient_shards.get(), device);
    if (options.ranks) {
      rank_weights = std::make_unique<RankWeights>(
          options.ranks->updates, shared ? shared->weights().storage.get() : nullptr);
    }
    copies =
        std::make_unique<ChunkCopies>(layout, shards, *states, executor, host->ledger(), reads);
    if (options.device_share) {
      device_updates = std::make_unique<DeviceUpdates>(layout, *options.rule, device, *device_tier,
                                                       *options.device_share);
    }
    updates = std::make_unique<ChunkUpdates>(layout, shards, *states, executor, options.rule, reads,
                                             rank_weights.get(), device_updates.get());
    clear();
  }
  TestStore(const TestStore&) = delete;
  TestStore& operator=(const TestStore&) = delete;

  [[nodiscard]] std::vector<ChunkId> chunks() const {
    std::vector<ChunkId> all;
    for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
      all.push_back(chunk_id(i));
    }
    return all;
  }
  [[nodiscard]] bool gradients_sharded(ChunkId chunk) const {
    return gradient_shards && gradient_shards->sharded(chunk);
  }
  [[nodiscard]] std::size_t bytes(ParamId param) const {
    return layout.param(param).numel * size_of(layout.param(param).type);
  }
  /// Returns the full parameter, wherever it is.
  [[nodiscard]] std::vector<std::byte> read_weights(ParamId param) const {
    std::vector<std::byte> values(bytes(param));
    if (manager->stored(layout.place(param).chunk)) {
      states->with_stored_weights(param, [&](const std::byte* first) {
        std::copy_n(first, values.size(), values.begin());
      });
    } else if (!values.empty()) {
      std::memcpy(values.data(), states->element(param, PayloadKind::kParam), values.size());
    }
    return values;
  }
  void write_weights(ParamId param, std::span<const std::byte> values) const {
    states->with_host_storage(
        param, [&](std::byte* first) { std::copy(values.begin(), values.end(), first); });
  }
  /// Writes a full gradient to where the chunk's gradients are on this rank.
  void write_gradient(ParamId param, std::span<const std::byte> values) {
    const ParamPlace place = layout.place(param);
    const std::size_t offset = place.offset * size_of(layout.param(param).type);
    if (gradients_sharded(place.chunk)) {
      const auto visit = gradient_shards->visit(place.chunk, GradientShards::Access::kWrite);
      std::copy(values.begin(), values.end(), gradients.address(place.chunk) + offset);
    } else if (manager->gradients_stored(place.chunk)) {
      const WeightUse use{.part = weights->gradients_of(place.chunk), .writes = true};
      const auto visit = weights->visit(std::span(&use, 1));
      std::copy(values.begin(), values.end(), gradients.address(place.chunk) + offset);
    } else {
      std::copy(values.begin(), values.end(), states->element(param, PayloadKind::kGrad));
    }
  }
  [[nodiscard]] std::vector<std::byte> read_gradient(ParamId param) {
    const ParamPlace place = layout.place(param);
    const std::size_t offset = place.offset * size_of(layout.param(param).type);
    std::shared_ptr<void> visit;
    if (gradients_sharded(place.chunk)) {
      visit = gradient_shards->visit(place.chunk, GradientShards::Access::kRead);
    } else if (manager->gradients_stored(place.chunk)) {
      const WeightUse use{.part = weights->gradients_of(place.chunk), .writes = false};
      visit = weights->visit(std::span(&use, 1));
    } else {
      const std::byte* const first = states->element(param, PayloadKind::kGrad);
      return {first, first + bytes(param)};
    }
    const std::byte* const first = gradients.address(place.chunk) + offset;
    return {first, first + bytes(param)};
  }
  /// Makes this rank's written copy of the gradients its shard of the mean, as a reduction over
  /// ranks with equal gradients does.
  void reduce_gradients(ChunkId chunk) {
    gradient_shards->reduce(
        chunk, [&](std::span<const std::byte> copy, std::span<std::byte> shard) {
          std::memcpy(shard.data(),
                      copy.data() + shards.first(chunk) * size_of(layout.chunk(chunk).type),
                      shard.size());
        });
  }
  /// Returns the elements of this rank's piece of a state.
  [[nodiscard]] std::vector<std::byte> read_state(ParamId param, PayloadKind kind) const {
    const Piece piece = shards.piece(param);
    std::vector<std::byte> values(states->bytes(param, kind, piece.numel));
    if (piece.numel > 0) {
      states->with_states(
          layout.place(param).chunk, StreamAccess::kRead, [&](const ChunkMemory& memory) {
            std::memcpy(values.data(), states->element(memory, param, kind, piece.first_element),
                        values.size());
          });
    }
    return values;
  }
  void write_state(ParamId param, PayloadKind kind, std::span<const std::byte> values) const {
    if (values.empty()) {
      return;
    }
    states->with_states(
        layout.place(param).chunk, StreamAccess::kEdit, [&](const ChunkMemory& memory) {
          std::copy(values.begin(), values.end(),
                    states->element(memory, param, kind, shards.piece(param).first_element));
        });
  }
  /// Announces and runs the updates of one chunk.
  void update(ChunkId chunk, std::span<const ParamUpdate> of_chunk) {
    updates->begin(chunk);
    updates->run(chunk, of_chunk);
    if (updates->collective() && states->on_device(chunk)) {
      updates->gather(chunk);
    }
  }

 private:
  static StoreOptions with_defaults(StoreOptions options, std::size_t count) {
    options.placements.resize(count, Placement::kStream);
    options.states_on_nvme.resize(count, false);
    options.weights_on_nvme.resize(count, false);
    return options;
  }
  void make_shared_storage() {
    SessionOptions session;
    session.backend = backend;
    session.state.rule = options.rule;
    session.zero_stage = options.zero_stage;
    session.extra_dp_size = options.copies;
    session.ranks = options.ranks;
    if (options.shares_host_storage) {
      shared = std::make_unique<RankHostStorage>(layout, options.placements, session, host);
      EXPECT_EQ(shared->refusal(), "");
    } else if (options.zero_stage > 1) {
      sharded = ShardedHostStorage(layout, options.placements, *options.ranks, options.zero_stage,
                                   options.copies, *host, executor);
    }
  }
  void make_nvme() {
    std::vector<NvmeContent> contents = {
        {.name = "parameters and gradients",
         .chunks = StoredWeights::parts_of(layout, options.weights_on_nvme),
         .num_slots = options.weight_slots},
        {.name = "optimizer states", .chunks = {}, .num_slots = options.state_slots}};
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
      auto& of_chunk = contents[1].chunks.emplace_back();
      if (options.states_on_nvme[i]) {
        of_chunk = state_payloads(layout.chunks()[i], options.rule.get(), layout.world_size());
        for (PayloadSpec& payload : of_chunk) {
          payload.name += " of chunk " + std::to_string(i);
        }
      }
    }
    for (const NvmeContent& content : contents) {
      bytes += content.stored_bytes();
    }
    if (bytes > 0) {
      nvme = std::make_unique<NvmeTier>(NvmeOptions{.directories = {options.directory},
                                                    .file_name = options.file_name,
                                                    .budget_bytes = bytes,
                                                    .engine = IoEngineKind::kThreads,
                                                    .replace_engine = ScopedFaults::replace,
                                                    .depth = 2},
                                        contents, *host, executor);
    }
  }
  void make_weights() {
    std::vector<bool> absent = options.weights_on_nvme;
    if (ChunkStream* const stream = sharded.stream()) {
      absent = sharded.sharded();
      weights = std::make_unique<StoredWeights>(
          StoredWeights::on_ranks(absent, ShardedHostStorage::kMaxLeases), params, gradients,
          *stream, device);
    } else if (nvme && nvme->stream(StoragePlan::kWeights) != nullptr) {
      weights = std::make_unique<StoredWeights>(
          StoredWeights::on_nvme(absent, options.weight_slots), params, gradients,
          *nvme->stream(StoragePlan::kWeights), device);
    }
    binder.param_store(std::move(absent));
  }
  /// Makes zeros of all payloads in memory, whose contents are unspecified. Those on NVMe are
  /// zeros.
  void clear() const {
    for (const ChunkId chunk : chunks()) {
      for (std::size_t kind = 0; kind < kNumPayloadKinds; ++kind) {
        if (const auto& payload = manager->payload(chunk, static_cast<PayloadKind>(kind));
            payload && payload->data() != nullptr) {
          std::memset(payload->data(), 0, payload->bytes());
        }
      }
      if (states->sharded(chunk)) {
        for (const std::size_t rank : sharded.shards()->kept_ranks()) {
          const auto shard = sharded.shards()->shard(chunk, rank);
          std::memset(shard.data(), 0, shard.size());
        }
      }
      if (gradients_sharded(chunk)) {
        const auto shard = sharded.shards()->shard(chunk_id(layout.chunks().size() + index(chunk)));
        std::memset(shard.data(), 0, shard.size());
      }
    }
  }
};

}  // namespace castor::testing
