#include "core/chunk_manager.h"

#include <cassert>
#include <functional>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {

ChunkManager::ChunkManager(const ChunkLayout& layout, const std::vector<Placement>& placements,
                           std::shared_ptr<MemoryTier> device, std::shared_ptr<MemoryTier> host,
                           CopyEngine& engine, ParamBinder& binder, ParamStore* store,
                           const std::shared_ptr<MemoryTier>& param_host,
                           std::shared_ptr<HostBlocks> copies)
    : layout_(layout),
      device_(std::move(device)),
      host_(std::move(host)),
      copies_(std::move(copies)),
      engine_(engine),
      binder_(binder),
      store_(store),
      residency_(layout, placements),
      slots_(layout.chunks().size()),
      states_(layout.params().size(), TensorState::kFree) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const ChunkSpec& spec = layout.chunk(chunk);
    add_payload(chunk, PayloadKind::kParam, spec.used_bytes, {},
                spec.updated_in_shards() ? param_host : nullptr);
    if (placements[i] == Placement::kDevice) {
      for (const ParamId param : layout.chunk(chunk).params) {
        states_[index(param)] = TensorState::kHold;
      }
    }
  }
}

ChunkManager::~ChunkManager() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    assert(pins(chunk) == 0 && "a pin outlived its chunk manager");
    if (!residency_.in_slot(chunk)) {
      continue;
    }
    try {
      leave(chunk);
    } catch (...) {  // nobody is left to tell; host storage is readable all the same
      bind_to_host(chunk);
    }
  }
}

void ChunkManager::add_payload(ChunkId chunk, PayloadKind kind, std::size_t bytes,
                               std::string_view name, const std::shared_ptr<MemoryTier>& host) {
  const std::string what(name.empty() ? to_string(kind) : name);
  auto& place = slots_[index(chunk)].payloads[static_cast<std::size_t>(kind)];
  if (place) {
    throw UsageError("chunk " + std::to_string(index(chunk)) + " already has " + what);
  }
  if ((stored(chunk) && kind == PayloadKind::kParam) ||
      (gradients_stored(chunk) && kind == PayloadKind::kGrad)) {
    place = std::make_shared<Payload>(bytes);
    return;
  }
  const bool on_device = placement(chunk) == Placement::kDevice;
  const auto& on_host = host ? host : host_;
  place = std::make_shared<Payload>(
      on_device ? device_ : on_host, bytes,
      "the " + what + " of chunk " + std::to_string(index(chunk)) + " have no room there; " +
          (on_device ? "raise device_memory, or let them leave the device with "
                       "placement_policy=\"auto\""
                     : "raise host_memory, or train a smaller model"),
      !on_device && on_host->shared_by_processes() ? copies_ : nullptr);
}

const std::shared_ptr<Payload>& ChunkManager::payload(ChunkId chunk, PayloadKind kind) const {
  return slots_[index(chunk)].payloads[static_cast<std::size_t>(kind)];
}

bool ChunkManager::fetch_blocks(ChunkId chunk) const {
  if (!engine_.asynchronous()) {
    return update_pending(chunk) || stored(chunk);
  }
  return stored(chunk) && num_sources_ >= store_->max_leases();
}

void ChunkManager::copy_in(ChunkId chunk) {
  Slot& slot = slots_[index(chunk)];
  const Payload& params = *slot.payloads[static_cast<std::size_t>(PayloadKind::kParam)];
  PendingUpdates* const updates = update_pending(chunk) ? updates_ : nullptr;
  const std::byte* data = params.data();
  if (stored(chunk)) {
    if (!slot.source) {
      slot.source = store_->lease(chunk);
      ++num_sources_;
    }
    data = slot.source->data();
  }
  std::function<void()> await_source;
  if (updates != nullptr || slot.source) {
    await_source = [updates, chunk, source = slot.source.get()] {
      if (updates != nullptr) {
        updates->wait(chunk);
      }
      if (source != nullptr) {
        source->wait(ParamAccess::kRead);
      }
    };
  }
  binder_.snapshot(chunk);
  slot.ticket = engine_.submit({.source = {data, params.bytes()},
                                .target = {slot.block.data(), params.bytes()},
                                .direction = CopyDirection::kHostToDevice,
                                .behind = device_->stream(),
                                .await_source = std::move(await_source)});
  counts_.h2d_bytes += params.bytes();
}

void ChunkManager::release_source(Slot& slot) noexcept {
  if (slot.source) {
    slot.source.reset();
    --num_sources_;
  }
}

// Where there is none in memory, whoever reads the parameters has it brought there.
void ChunkManager::bind_to_host(ChunkId chunk) noexcept {
  binder_.bind(chunk, payload(chunk, PayloadKind::kParam)->data());
}

void ChunkManager::take_copy(ChunkId chunk) {
  Payload& params = *payload(chunk, PayloadKind::kParam);
  if (!params.needs_copies() || params.has_copy() || params.away()) {
    return;
  }
  params.take_copy(Payload::CopyContents::kStorage);
  if (!bound(chunk)) {
    bind_to_host(chunk);
  }
}

void ChunkManager::drop_copy(ChunkId chunk) noexcept {
  Payload& params = *payload(chunk, PayloadKind::kParam);
  if (!params.has_copy()) {
    return;
  }
  params.drop_copy();
  if (!bound(chunk)) {
    bind_to_host(chunk);
  }
}

void ChunkManager::fetch(ChunkId chunk) {
  if (!try_fetch(chunk)) {
    throw device_->ledger().out_of_memory(
        layout_.chunk(chunk).capacity_bytes,
        "no room was made for chunk " + std::to_string(index(chunk)));
  }
}

bool ChunkManager::try_fetch(ChunkId chunk) {
  if (resident(chunk)) {
    return true;
  }
  Slot& slot = slots_[index(chunk)];
  const std::size_t bytes = layout_.chunk(chunk).capacity_bytes;
  auto reservation = device_->ledger().try_reserve(bytes);
  if (!reservation) {
    return false;
  }
  const std::uint64_t start_ns = clock();
  slot.block = device_->allocate(std::move(*reservation));
  try {
    copy_in(chunk);
  } catch (...) {
    slot.block.reset();
    release_source(slot);
    throw;
  }
  residency_.take_slot(chunk);
  ++counts_.fetches;
  if (recorder_ != nullptr) {
    recorder_->fetched(chunk, payload(chunk, PayloadKind::kParam)->bytes(), start_ns);
  }
  for (const ParamId param : layout_.chunk(chunk).params) {
    if (states_[index(param)] != TensorState::kReadyForReduce) {
      set_state(param, TensorState::kHold);
    }
  }
  return true;
}

void ChunkManager::await_copy_in(ChunkId chunk) {
  const std::uint64_t start_ns = clock();
  const std::uint64_t bytes_before = counts_.h2d_bytes;
  Slot& slot = slots_[index(chunk)];
  engine_.order(slot.ticket, device_->stream());
  if (binder_.written_since_snapshot(chunk)) {  // to host storage, during the copy
    copy_in(chunk);
    engine_.order(slot.ticket, device_->stream());
  }
  release_source(slot);
  if (recorder_ != nullptr) {
    recorder_->waited(chunk, counts_.h2d_bytes - bytes_before, start_ns);
  }
}

Pin ChunkManager::pin(ChunkId chunk) {
  Slot& slot = slots_[index(chunk)];
  if (!resident(chunk)) {
    throw UsageError("chunk " + std::to_string(index(chunk)) + " is pinned before it is fetched");
  }
  if (slot.block && !slot.bound) {
    try {
      await_copy_in(chunk);
    } catch (...) {
      drop(chunk);  // what the slot holds is not the chunk
      throw;
    }
    if (stored(chunk)) {
      store_->moved_out(chunk);
    }
    binder_.bind(chunk, slot.block.data());
    slot.bound = true;
  } else if (!slot.block) {
    if (update_pending(chunk)) {
      updates_->wait(chunk);
    }
    if (slot.before && !slot.before_taken) {
      const Payload& params = *slot.payloads[static_cast<std::size_t>(PayloadKind::kParam)];
      binder_.copy_on_device({params.data(), params.bytes()}, slot.before.data());
      binder_.snapshot(chunk);
      slot.before_taken = true;
    }
  }
  return residency_.pin(chunk);
}

Pin ChunkManager::pin_for_operator(ChunkId chunk, StreamId stream) {
  Slot& slot = slots_[index(chunk)];
  if (!bound(chunk)) {
    throw UsageError("chunk " + std::to_string(index(chunk)) +
                     " is held for an operator, but its parameters are not on the device");
  }
  if (stream != device_->stream()) {
    if (slot.block) {
      slot.block.add_user(stream);
    }
    for (const auto& payload : slot.payloads) {
      if (payload && payload->tier() == TierKind::kDevice) {
        payload->add_user(stream);
      }
    }
  }
  return residency_.pin(chunk, PinKind::kOperator);
}

// Brings what user code wrote on the device to host storage; returns the bytes copied.
std::size_t ChunkManager::write_back(ChunkId chunk) {
  if (!binder_.written_since_snapshot(chunk)) {
    return 0;
  }
  const Slot& slot = slots_[index(chunk)];
  Payload& params = *slot.payloads[static_cast<std::size_t>(PayloadKind::kParam)];
  params.take_copy(Payload::CopyContents::kStorage);  // where ranks share it, they have not written
  std::byte* data = params.data();
  std::unique_ptr<ParamLease> lease;
  if (stored(chunk)) {
    lease = store_->lease(chunk);
    lease->wait(ParamAccess::kWrite);
    data = lease->data();
  }
  binder_.before_write_back(chunk, data, slot.block.data());
  engine_.wait(engine_.submit({.source = {slot.block.data(), params.bytes()},
                               .target = {data, params.bytes()},
                               .direction = CopyDirection::kDeviceToHost,
                               .behind = device_->stream(),
                               .await_source = {}}));
  counts_.d2h_bytes += params.bytes();
  return params.bytes();
}

void ChunkManager::leave(ChunkId chunk) {
  const std::uint64_t start_ns = clock();
  Slot& slot = slots_[index(chunk)];
  if (pins(chunk) > 0) {
    throw UsageError("chunk " + std::to_string(index(chunk)) + " cannot leave the device: it has " +
                     std::to_string(pins(chunk)) + " pins");
  }
  for (const ParamId param : layout_.chunk(chunk).params) {
    if (states_[index(param)] == TensorState::kCompute) {
      throw UsageError("chunk " + std::to_string(index(chunk)) +
                       " cannot leave the device: parameter '" + layout_.param(param).name +
                       "' is in use");
    }
  }
  std::size_t copied_bytes = 0;
  slot.block.await_users();
  if (slot.bound) {
    copied_bytes = write_back(chunk);
    bind_to_host(chunk);
  } else {
    try {
      engine_.order(slot.ticket, device_->stream());  // the slot's next user is behind the copy
    } catch (...) {
      drop(chunk);
      throw;
    }
  }
  drop(chunk);
  if (recorder_ != nullptr) {
    recorder_->evicted(chunk, copied_bytes, start_ns);
  }
}

// Requires that the parameters are bound to host storage, that none is in use and that no copy into
// the slot is under way.
void ChunkManager::drop(ChunkId chunk) noexcept {
  Slot& slot = slots_[index(chunk)];
  for (const ParamId param : layout_.chunk(chunk).params) {
    TensorState& state = states_[index(param)];
    state = state == TensorState::kReadyForReduce ? state : TensorState::kFree;
  }
  residency_.give_up_slot(chunk);
  slot.block.reset();
  release_source(slot);
  slot.bound = false;
  slot.ticket = CopyTicket::kNone;
}

void ChunkManager::evict(ChunkId chunk) {
  if (!residency_.in_slot(chunk)) {
    throw UsageError("chunk " + std::to_string(index(chunk)) + " has no device copy to evict");
  }
  leave(chunk);
  ++counts_.evictions;
}

bool ChunkManager::make_room(std::size_t bytes, std::size_t cap_bytes, std::uint64_t horizon) {
  bool fits = false;
  const auto enough = [&] {
    // Read once: other threads take and give back non-model memory all the time, and "it did not
    // fit" may only be said of a moment when nothing was left to evict.
    fits = device_->ledger().available() >= bytes;
    return fits && residency_.slots_fit(bytes, cap_bytes);
  };
  residency_.evict_until(enough, horizon, [this](ChunkId victim) { evict(victim); });
  return fits;
}

void ChunkManager::move_to_host() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (residency_.in_slot(chunk)) {
      leave(chunk);
    }
    settle_writes(chunk);
  }
}

void ChunkManager::set_state(ParamId param, TensorState state) {
  TensorState& current = states_[index(param)];
  if (current == state) {
    return;
  }
  if (!can_transition(current, state)) {
    throw UsageError("parameter '" + layout_.param(param).name + "' cannot go from " +
                     std::string(to_string(current)) + " to " + std::string(to_string(state)));
  }
  current = state;
}

}  // namespace castor
