#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "core/chunk_manager.h"
#include "core/error.h"

// The part of ChunkManager that moves whole chunks to the device and back.
namespace castor {
namespace {

constexpr std::size_t kParam = static_cast<std::size_t>(PayloadKind::kParam);

}  // namespace

// The parameters of a promoted chunk take a whole slot, which they become when it is demoted.
std::size_t ChunkManager::on_device_bytes(ChunkId chunk) const {
  const bool for_good = placement(chunk) == Placement::kDevice && !promoted(chunk);
  const ChunkSpec& spec = layout_.chunk(chunk);
  std::size_t bytes = for_good ? spec.used_bytes : spec.capacity_bytes;
  for (std::size_t kind = 0; kind < kNumPayloadKinds; ++kind) {
    if (const auto& payload = slots_[index(chunk)].payloads[kind]; payload && kind != kParam) {
      bytes += payload->bytes();
    }
  }
  return for_good ? bytes : bytes + before_bytes(chunk);
}

std::size_t ChunkManager::before_bytes(ChunkId chunk) const {
  return slots_[index(chunk)].writes_followed ? layout_.chunk(chunk).used_bytes : 0;
}

void ChunkManager::settle_writes(ChunkId chunk) {
  Slot& slot = slots_[index(chunk)];
  if (slot.before_taken && binder_.written_since_snapshot(chunk)) {
    binder_.before_write_back(chunk, slot.before.data(), slot.payloads[kParam]->data());
  }
  slot.before_taken = false;
}

// Returns when all copies are over: no copy outlives its buffers, whichever of them fails.
void ChunkManager::copy_and_wait(std::span<const CopyRequest> requests) {
  std::vector<CopyTicket> tickets;
  std::exception_ptr failure;
  try {
    for (const CopyRequest& request : requests) {
      tickets.push_back(engine_.submit(request));
    }
  } catch (...) {
    failure = std::current_exception();
  }
  for (const CopyTicket ticket : tickets) {
    try {
      engine_.wait(ticket);
    } catch (...) {
      failure = failure ? failure : std::current_exception();
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

bool ChunkManager::try_promote(ChunkId chunk) {
  Slot& slot = slots_[index(chunk)];
  if (placement(chunk) != Placement::kStream || residency_.in_slot(chunk) ||
      update_pending(chunk) || stored(chunk)) {
    throw UsageError(
        "chunk " + std::to_string(index(chunk)) +
        " cannot become resident: it is not a streamed chunk in host memory, it is on NVMe, "
        "or its update is pending");
  }
  std::array<Block, kNumPayloadKinds> blocks;
  std::vector<CopyRequest> copies;
  for (std::size_t kind = 0; kind < kNumPayloadKinds; ++kind) {
    const auto& payload = slot.payloads[kind];
    if (!payload) {
      continue;
    }
    const std::size_t bytes =
        kind == kParam ? layout_.chunk(chunk).capacity_bytes : payload->bytes();
    auto reservation = device_->ledger().try_reserve(bytes);
    if (!reservation) {
      return false;
    }
    blocks[kind] = device_->allocate(std::move(*reservation));
    copies.push_back({.source = {payload->host_storage(), payload->bytes()},
                      .target = {blocks[kind].data(), payload->bytes()},
                      .direction = CopyDirection::kHostToDevice,
                      .behind = device_->stream(),
                      .await_source = {}});
  }
  auto reservation = device_->ledger().try_reserve(before_bytes(chunk));
  if (!reservation) {
    return false;
  }
  Block before = device_->allocate(std::move(*reservation));
  copy_and_wait(copies);
  slot.before = std::move(before);
  for (const CopyRequest& copy : copies) {
    counts_.h2d_bytes += copy.source.size();
  }
  ++counts_.promotions;
  for (std::size_t kind = 0; kind < kNumPayloadKinds; ++kind) {
    if (slot.payloads[kind]) {
      slot.payloads[kind]->move_to(device_, std::move(blocks[kind]));
    }
  }
  binder_.bind(chunk, slot.payloads[kParam]->data());
  residency_.promote(chunk);
  resident_bytes_ += on_device_bytes(chunk);
  for (const ParamId param : layout_.chunk(chunk).params) {
    TensorState& state = states_[index(param)];
    state = state == TensorState::kReadyForReduce ? state : TensorState::kHold;
  }
  return true;
}

void ChunkManager::demote(ChunkId chunk) {
  Slot& slot = slots_[index(chunk)];
  if (!promoted(chunk)) {
    throw UsageError("chunk " + std::to_string(index(chunk)) +
                     " cannot be demoted: it is not promoted");
  }
  if (residency_.operator_pins(chunk) > 0) {
    throw UsageError("chunk " + std::to_string(index(chunk)) + " cannot be demoted: " +
                     std::to_string(residency_.operator_pins(chunk)) + " operators use its memory");
  }
  if (update_pending(chunk)) {
    updates_->wait(chunk);
  }
  if (await_users_) {
    await_users_(chunk);
  }
  settle_writes(chunk);
  const std::uint64_t start_ns = clock();
  std::vector<CopyRequest> copies;
  std::size_t copied_bytes = 0;
  for (const auto& payload : slot.payloads) {
    if (payload) {
      payload->await_users();
      payload->take_copy(Payload::CopyContents::kZeros);  // it may be of this rank alone
      copies.push_back({.source = {payload->data(), payload->bytes()},
                        .target = {payload->host_storage(), payload->bytes()},
                        .direction = CopyDirection::kDeviceToHost,
                        .behind = device_->stream(),
                        .await_source = {}});
      copied_bytes += payload->bytes();
    }
  }
  binder_.snapshot(chunk);  // what user code writes from now on differs from host storage
  copy_and_wait(copies);
  counts_.d2h_bytes += copied_bytes;
  ++counts_.demotions;
  resident_bytes_ -= on_device_bytes(chunk);
  for (std::size_t kind = 0; kind < kNumPayloadKinds; ++kind) {
    if (slot.payloads[kind] && kind != kParam) {
      slot.payloads[kind]->move_to_host().reset();
    }
  }
  slot.before.reset();
  slot.block = slot.payloads[kParam]->move_to_host();
  slot.bound = true;
  slot.ticket = CopyTicket::kNone;
  residency_.demote(chunk);
  if (recorder_ != nullptr) {
    recorder_->evicted(chunk, copied_bytes, start_ns);
  }
}

bool ChunkManager::demote_one() {
  std::optional<ChunkId> last;
  const auto rank = [this](ChunkId chunk) {
    return std::pair(pins(chunk) == 0, residency_.next_use(chunk));
  };
  for (std::size_t i = 0; i < slots_.size() && resident_bytes_ > 0; ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (promoted(chunk) && residency_.operator_pins(chunk) == 0 &&
        (!last || rank(chunk) > rank(*last))) {
      last = chunk;
    }
  }
  if (last) {
    demote(*last);
  }
  return last.has_value();
}

}  // namespace castor
