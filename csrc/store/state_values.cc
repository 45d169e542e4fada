#include "store/state_values.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "optim/convert.h"
#include "optim/rule_of_type.h"
#include "optim/state_convert.h"

namespace castor {

StateValues::StateValues(ChunkManager& manager, const ShardMap& shards, StateStore& places,
                         Executor& executor, std::shared_ptr<const UpdateRule> rule,
                         const ChunkCopies& copies, RankStates* ranks)
    : manager_(manager),
      layout_(manager.layout()),
      shards_(shards),
      places_(places),
      executor_(executor),
      rule_(std::move(rule)),
      copies_(copies),
      ranks_(ranks) {}

StateFormat StateValues::format(ParamId param) const {
  return rule_ ? rule_of_type(*rule_, layout_.param(param).type).format() : StateFormat::kFp32;
}

std::span<const StateSpec> StateValues::specs(ParamId param) const {
  return rule_ ? rule_of_type(*rule_, layout_.param(param).type).states()
               : std::span<const StateSpec>();
}

std::vector<std::string> StateValues::names(ParamId param) const {
  std::vector<std::string> names;
  for (const StateSpec& spec : specs(param)) {
    names.emplace_back(spec.name);
  }
  return names;
}

void StateValues::write_master(const ChunkMemory& memory, ParamId param, std::size_t begin,
                               std::span<const float> exact) const {
  const Piece own = shards_.piece(param);
  const std::size_t first = std::max<std::size_t>(begin, own.first_element);
  const std::size_t end = std::min(begin + exact.size(), own.first_element + own.numel);
  if (first >= end) {
    return;
  }
  const float* const values = exact.data() + (first - begin);
  if (auto* const master = places_.data<float>(memory, param, kMasterPayload, first)) {
    std::memmove(master, values, (end - first) * sizeof(float));
  } else {
    split_masters(&executor_, places_.data<std::int16_t>(memory, param, kRemainderPayload, first),
                  values, end - first);
  }
}

void StateValues::write_rounded(std::byte* host, ParamId param, std::size_t begin,
                                std::span<const float> exact) const {
  const ScalarType type = layout_.param(param).type;
  master_to_param(&executor_, host + begin * size_of(type), exact.data(), exact.size(), type);
}

void StateValues::write(ParamId param, std::span<const std::byte* const> states) const {
  const Piece own = shards_.piece(param);
  edit(param, [&](const ChunkMemory& memory) {
    for (std::size_t i = 0; i < states.size() && own.numel > 0; ++i) {
      const PayloadKind kind = rule_payload(i);
      std::memcpy(places_.element(memory, param, kind, own.first_element),
                  states[i] + places_.bytes(param, kind, own.first_element),
                  places_.bytes(param, kind, own.numel));
    }
  });
}

void StateValues::zero(const std::function<void(const Payload&)>& zero) const {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    for (std::size_t state = 0; state < kMaxRuleStates; ++state) {
      const auto& payload = manager_.payload(chunk, rule_payload(state));
      if (payload && places_.on_device(chunk)) {
        zero(*payload);
      } else if (payload) {
        std::memset(payload->data(), 0, payload->bytes());
      }
    }
  }
}

void StateValues::before_write_back(ChunkId chunk, const std::byte* host,
                                    const std::byte* slot) const {
  if (places_.kinds(chunk).empty() ||
      !rule_of_type(*rule_, layout_.chunk(chunk).type).splits_masters()) {
    return;
  }
  const std::size_t bytes = layout_.chunk(chunk).used_bytes;
  std::vector<std::byte> host_copy;
  std::vector<std::byte> slot_copy;
  if (places_.device().computes_by_itself()) {  // one is its memory, and it may have written both
    host_copy = places_.bytes_of_device(host, bytes);
    slot_copy = places_.bytes_of_device(slot, bytes);
    host = host_copy.data();
    slot = slot_copy.data();
  }
  places_.with_states(chunk, StreamAccess::kEdit, [&](const ChunkMemory& memory) {
    auto* const remainder = memory[static_cast<std::size_t>(kRemainderPayload)];
    const std::size_t first = shards_.first(chunk);
    forget_remainders(&executor_, reinterpret_cast<std::int16_t*>(remainder),
                      reinterpret_cast<const std::uint16_t*>(host) + first,
                      reinterpret_cast<const std::uint16_t*>(slot) + first, shards_.numel(chunk));
  });
}

void StateValues::forget_changed(ParamId param, const void* before, const void* after) const {
  const Piece piece = shards_.piece(param);
  edit(param, [&](const ChunkMemory& memory) {
    const std::size_t first = piece.first_element;
    forget_remainders(&executor_,
                      places_.data<std::int16_t>(memory, param, kRemainderPayload, first),
                      static_cast<const std::uint16_t*>(before) + first,
                      static_cast<const std::uint16_t*>(after) + first, piece.numel);
  });
}

// The host's memory of a parameter's state, or a copy of what every rank has.
void StateValues::with_full(ParamId param, PayloadKind kind,
                            const std::function<void(const std::byte*)>& use) const {
  if (ranks_ != nullptr) {
    use(ranks_->read(param, kind).data());
    return;
  }
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kRead,
      [&](const ChunkMemory& memory) { use(places_.element(memory, param, kind)); });
}

void StateValues::join(float* masters, const void* weights, const void* remainders,
                       std::size_t numel) const {
  join_masters(&executor_, masters, static_cast<const std::uint16_t*>(weights),
               static_cast<const std::int16_t*>(remainders), numel);
}

void StateValues::read(ParamId param, std::size_t state, void* target) const {
  const PayloadKind kind = rule_payload(state);
  with_full(param, kind, [&](const std::byte* values) {
    std::memcpy(target, values, specs(param)[state].bytes(layout_.param(param).numel));
  });
}

void StateValues::read_master(ParamId param, std::size_t numel, const void* weights,
                              float* target) const {
  if (has_full_master(param)) {
    with_full(param, kMasterPayload,
              [&](const std::byte* master) { std::memcpy(target, master, numel * sizeof(float)); });
  } else {
    with_full(param, kRemainderPayload,
              [&](const std::byte* remainders) { join(target, weights, remainders, numel); });
  }
}

void StateValues::read_pieces(
    ParamId param, const std::function<void*(std::size_t state, std::size_t bytes)>& target) const {
  const Piece piece = shards_.piece(param);
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kRead, [&](const ChunkMemory& memory) {
        for (std::size_t i = 0; i < specs(param).size(); ++i) {
          const PayloadKind kind = rule_payload(i);
          const std::size_t bytes = places_.bytes(param, kind, piece.numel);
          void* const copy = target(i, bytes);
          if (bytes > 0) {
            std::memcpy(copy, places_.element(memory, param, kind, piece.first_element), bytes);
          }
        }
      });
}

void StateValues::read_master_piece(ParamId param, const void* weights, float* target) const {
  const Piece piece = shards_.piece(param);
  if (copied(param)) {
    join(target, weights, copies_.piece(param, kRemainderPayload).data.get(), piece.numel);
    return;
  }
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kRead, [&](const ChunkMemory& memory) {
        const std::size_t first = piece.first_element;
        if (const auto* const master = places_.data<float>(memory, param, kMasterPayload, first)) {
          std::memcpy(target, master, piece.numel * sizeof(float));
        } else {
          join(target, weights, places_.data<std::int16_t>(memory, param, kRemainderPayload, first),
               piece.numel);
        }
      });
}

}  // namespace castor
