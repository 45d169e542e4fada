#include "store/state_store.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"
#include "host/shared_host_storage.h"
#include "optim/rule_of_type.h"
#include "ranks/rank_weights.h"
#include "ranks/weight_shards.h"
#include "store/gradient_shards.h"
#include "store/stored_weights.h"

namespace castor {
namespace {

std::vector<PayloadKind> state_kinds(const ChunkSpec& chunk, const UpdateRule* rule) {
  std::vector<PayloadKind> kinds;
  if (rule == nullptr || !chunk.has_state) {
    return kinds;
  }
  rule = &rule_of_type(*rule, chunk.type);
  if (rule->splits_masters()) {
    kinds.push_back(kRemainderPayload);
  } else if (chunk.type != ScalarType::kFloat32) {
    kinds.push_back(kMasterPayload);
  }
  for (std::size_t i = 0; i < rule->states().size(); ++i) {
    kinds.push_back(rule_payload(i));
  }
  return kinds;
}

const StateSpec& spec_of(const UpdateRule& rule, PayloadKind kind) {
  return rule.states()[static_cast<std::size_t>(kind) - static_cast<std::size_t>(rule_payload(0))];
}

// As messages call it.
std::string_view plural_of(PayloadKind kind, const UpdateRule* rule) {
  return kind == kMasterPayload      ? "fp32 master weights"
         : kind == kRemainderPayload ? "low halves of the master weights"
                                     : spec_of(*rule, kind).plural;
}

// Of `numel` elements.
std::size_t bytes_of(PayloadKind kind, std::size_t numel, ScalarType type, const UpdateRule* rule) {
  if (kind == PayloadKind::kParam || kind == PayloadKind::kGrad) {
    return numel * size_of(type);
  }
  return kind == kMasterPayload      ? numel * sizeof(float)
         : kind == kRemainderPayload ? numel * sizeof(std::int16_t)
                                     : spec_of(rule_of_type(*rule, type), kind).bytes(numel);
}

}  // namespace

std::size_t param_alignment(const UpdateRule* rule, ScalarType precision) {
  const std::size_t granule = rule == nullptr ? 1 : rule_of_type(*rule, precision).granule();
  return granule == 1 || granule == UpdateRule::kWholeParameter ? kParamAlignment
                                                                : granule * size_of(precision);
}

std::vector<PayloadSpec> state_payloads(const ChunkSpec& chunk, const UpdateRule* rule,
                                        std::size_t ranks) {
  std::vector<PayloadSpec> payloads;
  for (const PayloadKind kind : state_kinds(chunk, rule)) {
    payloads.push_back(
        {std::string(plural_of(kind, rule)),
         bytes_of(kind, chunk.used_bytes / size_of(chunk.type) / ranks, chunk.type, rule)});
  }
  return payloads;
}

StateStore::StateStore(ChunkManager& manager, const ShardMap& shards,
                       std::shared_ptr<const UpdateRule> rule, std::vector<bool> stored,
                       ChunkStream* stream, StoredWeights* weights,
                       const SharedHostStorage* shared_storage, WeightShards* weight_shards,
                       const GradientShards* gradients, const SessionDevice& device)
    : manager_(manager),
      layout_(manager.layout()),
      shards_(shards),
      rule_(std::move(rule)),
      device_(device),
      weights_(weights),
      shared_storage_(shared_storage),
      weight_shards_(weight_shards),
      gradients_(gradients),
      stored_(std::move(stored)),
      stream_(stream) {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    if (layout_.chunks()[i].trainable) {
      check_format(ChunkId{static_cast<std::uint32_t>(i)});
    }
    kinds_.push_back(state_kinds(layout_.chunks()[i], rule_.get()));
  }
  make_payloads();
}

void StateStore::check_format(ChunkId chunk) const {
  const ChunkSpec& spec = layout_.chunk(chunk);
  const StateFormat format = rule_ ? rule_of_type(*rule_, spec.type).format() : StateFormat::kFp32;
  if (format != StateFormat::kFp32 && spec.type != ScalarType::kBFloat16) {
    throw InvalidArgument("optimizer state format " + std::string(to_string(format)) +
                          " splits the fp32 master of bfloat16 parameters, and chunk " +
                          std::to_string(index(chunk)) + " holds " +
                          std::string(to_string(spec.type)) + "; use format fp32");
  }
  if (shards_.ranks() > 1 && rule_ && rule_->granule() == UpdateRule::kWholeParameter) {
    throw InvalidArgument("the optimizer '" + std::string(rule_->name()) +
                          "' updates whole parameters, and " + std::to_string(shards_.ranks()) +
                          " ranks keep parts of them; train with one process");
  }
  const std::size_t alignment = param_alignment(rule_.get(), spec.type);
  if (spec.used_bytes % alignment != 0) {
    throw InvalidArgument("chunk " + std::to_string(index(chunk)) + " of " +
                          std::to_string(spec.used_bytes) + " bytes is not aligned to " +
                          std::to_string(alignment) + ", which optimizer state format " +
                          std::string(to_string(format)) + " needs");
  }
}

void StateStore::make_payloads() {
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    for (const PayloadKind kind : kinds_[i]) {
      if (!stored_[i]) {
        manager_.add_payload(chunk, kind, payload_bytes(chunk, kind), plural_of(kind, rule_.get()));
      }
    }
    if (!stored_[i] && !manager_.stored(chunk) && !kinds_[i].empty() &&
        rule_of_type(*rule_, layout_.chunk(chunk).type).splits_masters()) {
      manager_.follow_writes(chunk);  // a part of the master is in the parameter
    }
  }
}

std::size_t StateStore::payload_bytes(ChunkId chunk, PayloadKind kind) const {
  return bytes_of(kind, shards_.numel(chunk), layout_.chunk(chunk).type, rule_.get());
}

std::size_t StateStore::bytes(ParamId param, PayloadKind kind, std::size_t numel) const {
  return bytes_of(kind, numel, layout_.param(param).type, rule_.get());
}

std::vector<std::pair<PayloadKind, std::size_t>> StateStore::stored_payloads(ChunkId chunk) const {
  std::vector<std::pair<PayloadKind, std::size_t>> found;
  if (stored(chunk)) {
    for (const PayloadKind kind : kinds(chunk)) {
      found.emplace_back(kind, payload_bytes(chunk, kind));
    }
  }
  return found;
}

bool StateStore::has(ParamId param, PayloadKind kind) const {
  const auto& of_chunk = kinds(layout_.place(param).chunk);
  return std::find(of_chunk.begin(), of_chunk.end(), kind) != of_chunk.end();
}

std::string_view StateStore::name_of(PayloadKind kind) const {
  return kind == PayloadKind::kParam  ? "param"
         : kind == PayloadKind::kGrad ? "grad"
         : kind == kMasterPayload     ? "master"
         : kind == kRemainderPayload  ? "remainder"
                                      : spec_of(*rule_, kind).name;
}

std::byte* StateStore::element(ParamId param, PayloadKind kind) const {
  ChunkMemory memory{};
  if (const auto& payload = manager_.payload(layout_.place(param).chunk, kind)) {
    memory[static_cast<std::size_t>(kind)] = payload->data();
  }
  return element(memory, param, kind);
}

std::byte* StateStore::element(const ChunkMemory& memory, ParamId param, PayloadKind kind,
                               std::size_t number) const {
  std::byte* const payload = memory[static_cast<std::size_t>(kind)];
  if (payload == nullptr) {
    return nullptr;
  }
  const ParamPlace place = layout_.place(param);
  const std::size_t begin = in_shard(place.chunk, kind) ? shards_.first(place.chunk) : 0;
  return payload + bytes(param, kind, place.offset + number - begin);
}

ChunkMemory StateStore::resident(ChunkId chunk) const {
  ChunkMemory memory{};
  for (const PayloadKind kind : kinds(chunk)) {
    memory[static_cast<std::size_t>(kind)] = manager_.payload(chunk, kind)->data();
  }
  return memory;
}

// Parameters and gradients that are not on NVMe.
ChunkMemory StateStore::with_weights(ChunkId chunk, ChunkMemory memory) const {
  for (const PayloadKind kind : {PayloadKind::kParam, PayloadKind::kGrad}) {
    memory[static_cast<std::size_t>(kind)] =
        in_shard(chunk, kind) ? shard(chunk, kind) : manager_.payload(chunk, kind)->data();
  }
  return memory;
}

// Whether this rank has a part of what other payloads of the chunk have all of.
bool StateStore::in_shard(ChunkId chunk, PayloadKind kind) const noexcept {
  return kind == PayloadKind::kParam  ? sharded(chunk)
         : kind == PayloadKind::kGrad ? gradients_ != nullptr && gradients_->sharded(chunk)
                                      : true;
}

std::byte* StateStore::shard(ChunkId chunk, PayloadKind kind) const {
  return kind == PayloadKind::kParam ? weight_shards_->shard(chunk).data()
                                     : gradients_->shard(chunk);
}

bool StateStore::sharded(ChunkId chunk) const noexcept {
  return weight_shards_ != nullptr && weight_shards_->sharded(chunk);
}

void StateStore::check_writable(ParamId param) const {
  if (weights_ != nullptr) {
    weights_->check_writable(layout_.place(param).chunk);
  }
}

void StateStore::begin_update(ChunkId chunk) const {
  if (sharded(chunk)) {
    weight_shards_->begin_update(chunk);
    weights_->forget(chunk);
  }
}

void StateStore::end_update(ChunkId chunk) const {
  if (sharded(chunk)) {
    weight_shards_->end_update(chunk);
  }
}

ChunkMemory StateStore::in_place(ChunkId chunk) const {
  return with_weights(chunk, resident(chunk));
}

void StateStore::with_states(ChunkId chunk, StreamAccess access, const Work& work) const {
  if (on_device(chunk)) {
    with_copies(chunk, access, work);
    return;
  }
  if (!stored(chunk)) {
    work(resident(chunk));
    return;
  }
  stream_->use(index(chunk), access, [&](std::span<const std::span<std::byte>> payloads) {
    ChunkMemory memory{};
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      memory[static_cast<std::size_t>(kinds(chunk)[i])] = payloads[i].data();
    }
    work(memory);
  });
}

void StateStore::with_all(ChunkId chunk, const Work& work) const {
  if (!manager_.stored(chunk) || sharded(chunk)) {
    with_states(chunk, StreamAccess::kUpdate,
                [&](const ChunkMemory& states) { work(with_weights(chunk, states)); });
    return;
  }
  // Weights before states: what is written back from the device holds its weights and needs states.
  StoredWeights::Pins pins = weights_->pin_for_update(chunk);
  with_states(chunk, StreamAccess::kUpdate, [&](const ChunkMemory& states) {
    ChunkMemory memory = states;
    memory[static_cast<std::size_t>(PayloadKind::kParam)] = pins[0].payloads().front().data();
    memory[static_cast<std::size_t>(PayloadKind::kGrad)] = pins[1].payloads().front().data();
    work(memory);
  });
  pins[0].release();  // may throw
}

void StateStore::with_host_storage(ParamId param,
                                   const std::function<void(std::byte*)>& work) const {
  const ParamPlace place = layout_.place(param);
  const ParamSpec& spec = layout_.param(param);
  if (on_device(place.chunk)) {
    std::vector<std::byte> copy(spec.numel * size_of(spec.type));
    work(copy.data());
    device_.backend().copy_to_device(copy, element(param, PayloadKind::kParam));
    return;
  }
  if (sharded(place.chunk)) {
    std::vector<std::byte> copy(spec.numel * size_of(spec.type));
    work(copy.data());
    write_shards(param, copy);
    return;
  }
  if (!manager_.stored(place.chunk)) {
    await_host_storage_reads(place.chunk);
    work(element(param, PayloadKind::kParam));
    share_host_storage(param);
    return;
  }
  const std::unique_ptr<ParamLease> lease = weights_->lease(place.chunk);
  lease->wait(ParamAccess::kWrite);
  work(lease->data() + place.offset * size_of(spec.type));
}

void StateStore::with_stored_weights(ParamId param,
                                     const std::function<void(const std::byte*)>& work) const {
  const ParamPlace place = layout_.place(param);
  const std::unique_ptr<ParamLease> lease = weights_->lease(place.chunk);
  lease->wait(ParamAccess::kRead);
  work(lease->data() + place.offset * size_of(layout_.param(param).type));
}

// Every rank writes the same values, each the pieces that it keeps.
void StateStore::write_shards(ParamId param, std::span<const std::byte> values) const {
  const ParamPlace place = layout_.place(param);
  const std::size_t numel_of_shard = shards_.numel(place.chunk);
  for (const std::size_t rank : weight_shards_->kept_ranks()) {
    if (const Piece piece = shards_.piece(param, rank); piece.numel > 0) {
      const std::size_t begin = place.offset + piece.first_element - rank * numel_of_shard;
      std::memcpy(weight_shards_->shard(place.chunk, rank).data() +
                      bytes(param, PayloadKind::kParam, begin),
                  values.data() + bytes(param, PayloadKind::kParam, piece.first_element),
                  bytes(param, PayloadKind::kParam, piece.numel));
    }
  }
  weights_->forget(place.chunk);
}

// So that a rank does not keep a copy of all that it has overwritten.
void StateStore::share_host_storage(ParamId param) const {
  const Payload& chunk = weights(layout_.place(param).chunk);
  if (shared_storage_ == nullptr || !shared_storage_->contains(chunk.storage())) {
    return;
  }
  std::byte* const first = element(param, PayloadKind::kParam);
  const Piece piece = shards_.piece(param);
  const std::span own(first + bytes(param, PayloadKind::kParam, piece.first_element),
                      bytes(param, PayloadKind::kParam, piece.numel));
  share_bytes(*shared_storage_, chunk, own);
  if (!chunk.away()) {
    shared_storage_->forget_within(
        {first, bytes(param, PayloadKind::kParam, layout_.param(param).numel)});
  }
}

std::vector<std::byte> StateStore::bytes_of_device(const std::byte* data, std::size_t bytes) const {
  std::vector<std::byte> copy(bytes);
  device_.backend().copy_from_device({data, bytes}, copy.data());
  return copy;
}

void StateStore::with_copies(ChunkId chunk, StreamAccess access, const Work& work) const {
  std::vector<std::vector<std::byte>> copies;
  ChunkMemory memory{};
  for (const PayloadKind kind : kinds(chunk)) {
    const Payload& payload = *manager_.payload(chunk, kind);
    copies.push_back(bytes_of_device(payload.data(), payload.bytes()));
    memory[static_cast<std::size_t>(kind)] = copies.back().data();
  }
  work(memory);
  for (std::size_t i = 0; i < copies.size() && access != StreamAccess::kRead; ++i) {
    device_.backend().copy_to_device(copies[i], manager_.payload(chunk, kinds(chunk)[i])->data());
  }
}

void StateStore::await_host_storage_reads(ChunkId chunk) const {
  if (!manager_.stored(chunk)) {  // else StoredWeights sees to it
    const Payload& params = *manager_.payload(chunk, PayloadKind::kParam);
    device_.host_writes({params.data(), params.bytes()});
  }
}

void StateStore::announce(std::span<const ChunkId> chunks) {
  if (weights_ != nullptr) {
    weights_->announce_updates(chunks);
  }
  if (stream_ == nullptr) {
    return;
  }
  std::size_t room = stream_->max_ahead() + 1;  // with the one that is used next
  for (const ChunkId chunk : chunks) {
    if (room == 0) {
      return;
    }
    if (stored(chunk)) {
      stream_->prefetch(index(chunk));
      --room;
    }
  }
}

void StateStore::flush() {
  if (stream_ != nullptr) {
    stream_->flush();
  }
}

void StateStore::discard_stored() {
  if (stream_ != nullptr) {
    stream_->discard_all();
  }
}

}  // namespace castor
