#include "store/session_updates.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "core/error.h"
#include "store/chunk_pins.h"

namespace castor {
namespace {

std::uint64_t monotonic_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

ChunkId chunk_id(std::size_t i) { return ChunkId{static_cast<std::uint32_t>(i)}; }

/// Chunks that an operator uses, until it is over. Parts in the window come back before those on
/// the device may leave it, and the owner, whoever drops it meanwhile, goes last.
struct OperatorVisit {
  std::shared_ptr<void> owner;
  ChunkPins chunks;
  std::unique_ptr<StoredWeights::Visit> weights;
  std::vector<std::shared_ptr<void>> gradients;  // that are sharded
  std::shared_ptr<void> awaited;                 // ends first, when the operator has read those
};

/// Returns an object whose end waits for what the device has been given: an operator has returned
/// by then, but may still be under way.
std::shared_ptr<void> await_at_end(const SessionDevice& device) {
  return {nullptr, [&device](void*) {
            try {
              device.await();
            } catch (...) {  // the device is lost, and says so to whoever uses it next
            }
          }};
}

RuntimeOptions runtime_options(const SessionMemory& memory, const SessionOptions& options) {
  RuntimeOptions own = options.runtime;
  own.freed_slots = memory.device().computes_by_itself() ? FreedSlots::kReusedAtOnce
                                                         : FreedSlots::kKeepTheirBytes;
  return own;
}

std::unique_ptr<DeviceUpdates> make_device_updates(const SessionMemory& memory,
                                                   const OptimizerStateOptions& states) {
  const DeviceShare& share = states.device_share;
  if (share.fraction == 0.0 && !share.adapts) {
    return nullptr;
  }
  if (states.rule == nullptr) {
    throw UsageError(
        "device_update_fraction is given, and another optimizer than castor's updates "
        "the parameters of this model; leave it out");
  }
  return std::make_unique<DeviceUpdates>(memory.layout(), *states.rule, memory.device(),
                                         *memory.device_tier(), share);
}

std::unique_ptr<SessionRanks> make_ranks(const SessionUpdates::Parts& parts,
                                         const StateStore& states, const SessionOptions& options) {
  return !options.ranks
             ? nullptr
             : std::make_unique<SessionRanks>(
                   *options.ranks, parts.chunks.manager(), parts.memory.shards(), parts.gradients,
                   parts.chunks.gradient_shards(), states, parts.memory.rank_host_storage(),
                   options.backend->make_staging_engine(), parts.memory.executor());
}

}  // namespace

SessionUpdates::SessionUpdates(Parts parts, const SessionOptions& options)
    : parts_(std::move(parts)),
      states_(parts_.chunks.manager(), parts_.memory.shards(), options.state.rule,
              parts_.memory.plan().stored.states, parts_.memory.stream_of(StoragePlan::kStates),
              parts_.chunks.weights(), parts_.memory.rank_host_storage().weights().storage.get(),
              parts_.memory.sharded_host_storage().shards(), parts_.chunks.gradient_shards(),
              parts_.memory.device()),
      runtime_(std::make_unique<Runtime>(
          parts_.chunks.manager(), parts_.memory.nonmodel(),
          runtime_options(parts_.memory, options), Runtime::Clock(monotonic_ns),
          parts_.memory.budgets()->runtimes(), options.backend->make_clock())),
      ranks_(make_ranks(parts_, states_, options)),
      reads_(num_chunks(), [this](ChunkId chunk) { return copies_.finish(chunk); }),
      copies_(parts_.memory.layout(), parts_.memory.shards(), states_, parts_.memory.executor(),
              parts_.memory.host_tier()->ledger(), reads_),
      device_updates_(make_device_updates(parts_.memory, options.state)),
      updates_(parts_.memory.layout(), parts_.memory.shards(), states_, parts_.memory.executor(),
               options.state.rule, reads_, ranks_ ? &ranks_->weights() : nullptr,
               device_updates_.get()),
      updater_(Updater::Parts{.layout = parts_.memory.layout(),
                              .updates = updates_,
                              .places = states_,
                              .gradients = parts_.gradients,
                              .runtime = *runtime_,
                              .gate = parts_.gate,
                              .integrity = integrity_,
                              .copies = parts_.chunks.copies(),
                              .device = parts_.memory.device(),
                              .queue = parts_.chunks.queue(),
                              .steps = parts_.steps,
                              .replaced = parts_.replaced},
               options.overlap,
               [this](ChunkId chunk) { return parts_.aliased(chunk) || parts_.rebound(chunk); }) {
  if (ranks_) {
    parts_.chunks.manager().await_before_demotion(
        [this](ChunkId chunk) { ranks_->gradients().wait(chunk); });
    integrity_.when_broken([this] {
      ranks_->leave();
      if (WeightShards* const shards = parts_.memory.sharded_host_storage().shards()) {
        shards->leave();
      }
    });
  }
}

void SessionUpdates::end() noexcept {
  if (WeightShards* const shards = parts_.memory.sharded_host_storage().shards()) {
    shards->end_reads();  // else ranks that have failed may wait here for each other
  }
  reads_.end_all();  // else an update may wait for who has gone
  if (UpdateQueue* const queue = parts_.chunks.queue()) {
    queue->abandon();  // returns when none is under way
  }
}

void SessionUpdates::leave() noexcept {
  parts_.chunks.manager().await_before_demotion(nullptr);
  ranks_.reset();
  runtime_.reset();
}

bool SessionUpdates::torn() const noexcept {
  const StoredWeights* const weights = parts_.chunks.weights();
  return states_.torn() || (weights != nullptr && weights->torn());
}

// What was changed in the window is written when its memory is needed: in a forward, in a load.
void SessionUpdates::note_torn_payloads() {
  if (integrity_.consistent() && torn()) {
    integrity_.broke(
        std::string(states_.torn() ? "an optimizer state" : "parameters or gradients") +
        " could not be written to NVMe");
  }
}

void SessionUpdates::check_consistent() {
  note_torn_payloads();
  integrity_.check();
}

void SessionUpdates::arriving(ParamId param) {
  const ChunkId own = parts_.memory.layout().place(param).chunk;
  if (ranks_) {
    ranks_->gradients().arriving(own, parts_.gate);
  }
  if (updater_.updated(own)) {
    updater_.check_none_updated("another gradient of parameter '" +
                                parts_.memory.layout().param(param).name + "' arrived");
  }
}

void SessionUpdates::completed(ChunkId chunk) {
  updater_.completed(chunk);
  if (ranks_) {
    ranks_->gradients().completed(chunk, parts_.gate);
  }
}

void SessionUpdates::writing(ChunkId chunk) {
  if (ranks_) {
    ranks_->gradients().writing(chunk);
  }
}

// Of weights as they are before all ranks update them, or load others: the next are of those. And
// what the last update sends between copies.
void SessionUpdates::end_reads_of_shards() {
  reads_.wait_for_all();
  parts_.chunks.weights()->await_reads();
  parts_.memory.sharded_host_storage().shards()->await_exchanges();
}

void SessionUpdates::await_reads_of_ranks() {
  const SessionDevice& device = parts_.memory.device();
  const auto& weights = parts_.memory.rank_host_storage().weights().storage;
  if (weights && device.computes_by_itself()) {
    device.await();
    device.host_writes(weights->all());
  }
}

void SessionUpdates::begin_update() {
  runtime_->begin_update();
  if (parts_.memory.sharded_host_storage().stage() == 3) {
    end_reads_of_shards();
    ranks_->barrier();
  }
  updater_.forget_completed();
  for (std::size_t i = 0; i < num_chunks(); ++i) {
    const ChunkId chunk = chunk_id(i);
    if (!updater_.updated(chunk)) {  // else they are used already, and may still be under way
      parts_.gate.pass(i);
      parts_.gate.pass(gradient_group(parts_.memory.layout(), chunk));
    }
  }
}

void SessionUpdates::finish_step() {
  if (ranks_) {
    ranks_->gradients().end_step();
  }
  runtime_->finish_step();
}

// A tensor over a chunk's memory follows it to the device and back (docs/design/0017), but memory
// that was reached without one (a numpy array) would not: a chunk that something else than castor
// refers to stays where it is. So does one of which something is on NVMe, or in parts on the ranks.
void SessionUpdates::place_chunks_again() {
  if (!runtime_->placement_due() || !integrity_.consistent() || reads_.reading()) {
    return;  // while a save reads payloads they stay where they are: a later step places them
  }
  updater_.wait_for_all();
  std::vector<bool> candidates(num_chunks());
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const ChunkId chunk = chunk_id(i);
    candidates[i] = parts_.chunks.manager().promoted(chunk) ||
                    (!states_.stored(chunk) && !parts_.chunks.stored(chunk) &&
                     !parts_.chunks.sharded_gradients(chunk) && !parts_.aliased(chunk));
  }
  runtime_->place(candidates);
}

void SessionUpdates::begin_load(RunLoad load) {
  reads_.wait_for_all();
  if (ranks_) {
    ranks_->check_there();
  }
  updater_.abandon();
  if (ranks_ && load.weights != LoadedWeights::kNone) {
    if (parts_.memory.sharded_host_storage().stage() == 3) {
      runtime_->move_to_host();
      end_reads_of_shards();
    }
    await_reads_of_ranks();
    ranks_->begin_load();
  }
  note_torn_payloads();
  if (load.states || !integrity_.consistent()) {
    states_.discard_stored();
  }
}

void SessionUpdates::loading(RunLoad load) {
  integrity_.loading(load);
  parts_.gate.pass_all();
  runtime_->move_to_host();
  if (parts_.chunks.weights() != nullptr && parts_.memory.sharded_host_storage().stage() != 3 &&
      load.weights == LoadedWeights::kAll) {
    parts_.chunks.weights()->discard_parameters();
  }
}

void SessionUpdates::share_weights() {
  if (!ranks_) {
    return;
  }
  ranks_->end_load(states_);
  for (std::size_t i = 0; i < num_chunks(); ++i) {
    states_.await_host_storage_reads(chunk_id(i));
    runtime_->drop_copy(chunk_id(i));
  }
}

void SessionUpdates::settle_group(std::size_t group) {
  const ChunkId chunk = chunk_id(group % num_chunks());
  const bool of_gradients = group >= num_chunks();
  if (updater_.updated(chunk)) {
    updater_.check_none_updated(of_gradients ? "a gradient was read or changed"
                                             : "a weight or moment was read");
  }
  if (of_gradients) {
    parts_.gradients.wait(chunk);
    if (ranks_) {
      ranks_->gradients().settle(chunk);
    }
  }
  updater_.wait(chunk);
}

// The gate's groups are numbered as the parts of StoredWeights (docs/design/0018).
std::shared_ptr<void> SessionUpdates::visit(std::shared_ptr<void> owner,
                                            std::span<const OperatorUse> uses) {
  const StreamId stream = parts_.memory.device().current_stream();
  auto visit = std::make_shared<OperatorVisit>(OperatorVisit{.owner = std::move(owner),
                                                             .chunks = ChunkPins(*runtime_),
                                                             .weights = nullptr,
                                                             .gradients = {},
                                                             .awaited = nullptr});
  const SessionChunks& chunks = parts_.chunks;
  std::vector<WeightUse> in_window;
  for (const OperatorUse& use : uses) {
    const ChunkId chunk = chunk_id(use.group % num_chunks());
    const auto used = use.group == index(chunk) ? PayloadKind::kParam : PayloadKind::kGrad;
    if (used == PayloadKind::kGrad && use.writes) {
      writing(chunk);
    }
    if (used == PayloadKind::kGrad && chunks.sharded_gradients(chunk)) {
      using Access = GradientShards::Access;
      visit->gradients.push_back(
          chunks.gradient_shards()->visit(chunk, use.writes ? Access::kWrite : Access::kRead));
      // The next reader's copy may lie where this one does.
      if (parts_.memory.device().computes_by_itself() &&
          !chunks.gradient_shards()->has_copy(chunk)) {
        visit->awaited = await_at_end(parts_.memory.device());
      }
      continue;
    }
    if (chunks.weights() != nullptr && used == PayloadKind::kParam && use.writes) {
      chunks.weights()->check_writable(chunk);
    }
    const bool in_no_memory = used == PayloadKind::kParam
                                  ? chunks.stored(chunk)
                                  : chunks.manager().gradients_stored(chunk);
    if (visit->chunks.add(chunk, stream, used)) {
      continue;
    }
    if (in_no_memory) {
      in_window.push_back({.part = use.group, .writes = use.writes});
    } else if (used == PayloadKind::kParam && use.writes) {
      runtime_->take_copy(chunk);
    }
  }
  if (!in_window.empty()) {
    visit->weights = chunks.weights()->visit(in_window);
  }
  return visit;
}

}  // namespace castor
