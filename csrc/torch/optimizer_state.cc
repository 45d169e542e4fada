#include "torch/optimizer_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "optim/convert.h"
#include "optim/rule_of_type.h"
#include "optim/state_convert.h"
#include "torch/device_bytes.h"
#include "torch/torch_device.h"

namespace castor {
namespace {

at::Tensor tensor_of(ChunkCopies::Bytes bytes, at::ScalarType type) {
  const std::size_t numel = bytes.size / at::elementSize(type);
  auto* const data = const_cast<std::byte*>(bytes.data.get());
  return at::for_blob(data, {static_cast<std::int64_t>(numel)})
      .deleter([memory = std::move(bytes.data)](void*) {})
      .options(at::TensorOptions().dtype(type))
      .make_tensor();
}

constexpr std::int64_t kPieceNumel = std::int64_t{1} << 20;

at::ScalarType to_torch(StateType type) {
  switch (type) {
    case StateType::kFloat32: return at::kFloat;
    case StateType::kBFloat16: return at::kBFloat16;
    case StateType::kUInt8: return at::kByte;
  }
  return at::kFloat;
}

/// Elements in the order of the memory that geometry_of(param) describes.
at::Tensor in_order_of(const at::Tensor& param, const at::Tensor& values) {
  if (values.sizes() != param.sizes()) {
    throw InvalidArgument("values of " + std::to_string(values.numel()) + " elements in " +
                          std::to_string(values.dim()) +
                          " dimensions do not have the shape of their parameter, which has " +
                          std::to_string(param.numel()) + " in " + std::to_string(param.dim()));
  }
  const ParamGeometry geometry = geometry_of(param);
  if (values.is_non_overlapping_and_dense() && values.strides() == geometry.strides) {
    return values.as_strided({values.numel()}, {1});
  }
  if (values.is_same(param)) {  // neither dense nor in memory of its own: row-major from now on
    return values.reshape({-1});
  }
  return at::empty_strided(geometry.sizes, geometry.strides, values.options())
      .copy_(values)
      .as_strided({values.numel()}, {1});
}

/// Calls `use(first element, piece)` for one piece of a flat tensor after another, so that what is
/// made of a piece stays small.
template <typename Use>
void for_each_piece(const at::Tensor& values, const Use& use) {
  for (std::int64_t begin = 0; begin < values.numel(); begin += kPieceNumel) {
    use(static_cast<std::size_t>(begin),
        values.narrow(0, begin, std::min(kPieceNumel, values.numel() - begin)));
  }
}

/// As at::empty_like(param, type), which for a parameter on NVMe would have it read first.
at::Tensor empty_as(const at::Tensor& param, at::ScalarType type) {
  const ParamGeometry geometry = geometry_of(param);
  return at::empty_strided(geometry.sizes, geometry.strides, at::TensorOptions().dtype(type));
}

/// A flat tensor's memory as one of that geometry.
at::Tensor in_shape(const at::Tensor& flat, const ParamGeometry& geometry) {
  return flat.as_strided(geometry.sizes, geometry.strides);
}

std::size_t numel_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

}  // namespace

OptimizerState::OptimizerState(ChunkManager& manager, const ShardMap& shards, StateStore& places,
                               std::span<const ParamHandle> params, Executor& executor,
                               std::shared_ptr<const UpdateRule> rule, const ChunkCopies& copies,
                               RankStates* ranks)
    : manager_(manager),
      layout_(manager.layout()),
      shards_(shards),
      places_(places),
      params_(params),
      executor_(executor),
      rule_(std::move(rule)),
      copies_(copies),
      ranks_(ranks) {}

StateFormat OptimizerState::format(ParamId param) const {
  return rule_ ? rule_of_type(*rule_, layout_.param(param).type).format() : StateFormat::kFp32;
}

std::span<const StateSpec> OptimizerState::specs(ParamId param) const {
  return rule_ ? rule_of_type(*rule_, layout_.param(param).type).states()
               : std::span<const StateSpec>();
}

std::vector<std::string> OptimizerState::names(ParamId param) const {
  std::vector<std::string> names;
  for (const StateSpec& spec : specs(param)) {
    names.emplace_back(spec.name);
  }
  return names;
}

at::Tensor OptimizerState::on_host(ParamId param) const {
  const at::Tensor& own = params_[index(param)].local;
  return places_.device().computes_by_itself() ? own.to(at::kCPU) : own;
}

// `exact`: fp32 values from the parameter's element `begin` on, of which this rank's count.
void OptimizerState::write_master(const ChunkMemory& memory, ParamId param, std::size_t begin,
                                  const at::Tensor& exact) const {
  const Piece own = shards_.piece(param);
  const std::size_t first = std::max<std::size_t>(begin, own.first_element);
  const std::size_t end = std::min(begin + numel_of(exact), own.first_element + own.numel);
  if (first >= end) {
    return;
  }
  const auto* const values = exact.const_data_ptr<float>() + (first - begin);
  if (auto* const master = places_.data<float>(memory, param, kMasterPayload, first)) {
    std::memmove(master, values, (end - first) * sizeof(float));
  } else {
    split_masters(&executor_, places_.data<std::int16_t>(memory, param, kRemainderPayload, first),
                  values, end - first);
  }
}

void OptimizerState::adopt(ParamId param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const ScalarType type = layout_.param(param).type;
  const at::Tensor& own = params_[index(param)].local;
  if (!has_master(param)) {
    const ParamGeometry geometry = geometry_of(own);
    places_.with_host_storage(param, [&](std::byte* host) {
      at::from_blob(host, geometry.sizes, geometry.strides, castor::to_torch(type)).copy_(values);
    });
    return;
  }
  const auto adopt_at = [&](const ChunkMemory& memory, std::byte* host) {
    for_each_piece(in_order_of(own, values), [&](std::size_t begin, const at::Tensor& piece) {
      const at::Tensor exact = piece.to(at::kCPU, at::kFloat).contiguous();
      write_master(memory, param, begin, exact);
      master_to_param(&executor_, host + begin * size_of(type), exact.const_data_ptr<float>(),
                      numel_of(piece), type);
    });
  };
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kEdit, [&](const ChunkMemory& memory) {
        places_.with_host_storage(param, [&](std::byte* host) { adopt_at(memory, host); });
      });
}

bool OptimizerState::set_master(ParamId param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  if (!has_master(param)) {
    return false;
  }
  places_.with_states(layout_.place(param).chunk, StreamAccess::kEdit,
                      [&](const ChunkMemory& memory) {
                        for_each_piece(in_order_of(params_[index(param)].local, values),
                                       [&](std::size_t begin, const at::Tensor& piece) {
                                         write_master(memory, param, begin,
                                                      piece.to(at::kCPU, at::kFloat).contiguous());
                                       });
                      });
  return true;
}

void OptimizerState::zero() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    for (std::size_t state = 0; state < kMaxRuleStates; ++state) {
      const auto& payload = manager_.payload(chunk, rule_payload(state));
      if (payload && places_.on_device(chunk)) {
        bytes_at(payload->data(), payload->bytes(), to_torch(places_.device().id())).zero_();
      } else if (payload) {
        std::memset(payload->data(), 0, payload->bytes());
      }
    }
  }
}

void OptimizerState::before_write_back(ChunkId chunk, const std::byte* host,
                                       const std::byte* slot) {
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

void OptimizerState::before_overwrite(ParamId param, const at::Tensor& values) {
  const Piece piece = shards_.piece(param);
  places_.check_writable(param);
  if (!places_.has(param, kRemainderPayload) || piece.numel == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor own = on_host(param);
  // In the order of the parameter's memory, and rounded as the copy will round.
  const at::Tensor after = empty_as(own, own.scalar_type()).copy_(values);
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kEdit, [&](const ChunkMemory& memory) {
        const std::size_t first = piece.first_element;
        forget_remainders(
            &executor_, places_.data<std::int16_t>(memory, param, kRemainderPayload, first),
            static_cast<const std::uint16_t*>(own.const_data_ptr()) + first,
            static_cast<const std::uint16_t*>(after.const_data_ptr()) + first, piece.numel);
      });
}

ParamGeometry OptimizerState::geometry(ParamId param, const StateSpec& spec) const {
  if (spec.block == 1) {
    return geometry_of(params_[index(param)].local);
  }
  const auto width = static_cast<std::int64_t>(spec.width);
  const std::size_t num_values = spec.bytes(layout_.param(param).numel) / size_of(spec.type);
  return {.sizes = {static_cast<std::int64_t>(num_values) / width, width}, .strides = {width, 1}};
}

std::vector<at::Tensor> OptimizerState::views(ParamId param) const {
  const ParamPlace place = layout_.place(param);
  std::vector<at::Tensor> views;
  if (!places_.shown(place.chunk)) {
    return views;
  }
  for (std::size_t i = 0; i < specs(param).size(); ++i) {
    const auto& payload = manager_.payload(place.chunk, rule_payload(i));
    if (!payload) {
      return {};
    }
    const StateSpec& spec = specs(param)[i];
    views.push_back(tensor_over(storage_over(payload), to_torch(spec.type),
                                spec.bytes(place.offset) / size_of(spec.type),
                                geometry(param, spec)));
  }
  return views;
}

std::optional<at::Tensor> OptimizerState::master_view(ParamId param) const {
  const ParamPlace place = layout_.place(param);
  const auto& payload = manager_.payload(place.chunk, kMasterPayload);
  if (!places_.shown(place.chunk) || !payload) {
    return std::nullopt;
  }
  return tensor_over(storage_over(payload), at::kFloat, place.offset,
                     geometry_of(params_[index(param)].local));
}

std::optional<at::Tensor> OptimizerState::master(
    ParamId param, const std::function<at::Tensor()>& weights_on_host) const {
  if (!has_master(param)) {
    return std::nullopt;
  }
  if (auto shown = master_view(param)) {
    return shown;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor own = weights_on_host();
  at::Tensor values = empty_as(own, at::kFloat);
  const bool whole = places_.has(param, kMasterPayload);
  with_state(param, whole ? kMasterPayload : kRemainderPayload, [&](const std::byte* state) {
    if (whole) {
      std::memcpy(values.mutable_data_ptr(), state, values.nbytes());
    } else {
      join_masters(&executor_, values.mutable_data_ptr<float>(),
                   static_cast<const std::uint16_t*>(own.const_data_ptr()),
                   reinterpret_cast<const std::int16_t*>(state), numel_of(own));
    }
  });
  return values;
}

at::Tensor OptimizerState::saved_weights(ParamId param) const {
  const ParamPlace place = layout_.place(param);
  const ParamGeometry geometry = geometry_of(params_[index(param)].local);
  const at::ScalarType type = castor::to_torch(layout_.param(param).type);
  if (copied(param)) {
    if (shards_.ranks() > 1) {
      throw Error("all of parameter '" + layout_.param(param).name +
                  "' was asked for, of which a save has copied this rank's piece");
    }
    return in_shape(tensor_of(copies_.piece(param, PayloadKind::kParam), type), geometry);
  }
  if (!manager_.stored(place.chunk)) {
    const c10::Device device =
        places_.on_device(place.chunk) ? to_torch(places_.device().id()) : c10::kCPU;
    return tensor_over(storage_over(manager_.payload(place.chunk, PayloadKind::kParam), device),
                       type, place.offset, geometry);
  }
  at::Tensor copy = empty_as(params_[index(param)].local, type);
  places_.with_stored_weights(param, [&](const std::byte* values) {
    std::memcpy(copy.mutable_data_ptr(), values, copy.nbytes());
  });
  return copy;
}

at::Tensor OptimizerState::saved_weights_of_piece(ParamId param) const {
  const Piece piece = shards_.piece(param);
  const auto numel = static_cast<std::int64_t>(piece.numel);
  if (copied(param)) {
    return tensor_of(copies_.piece(param, PayloadKind::kParam),
                     castor::to_torch(layout_.param(param).type));
  }
  const at::Tensor whole = saved_weights(param);
  return whole.as_strided({numel}, {1},
                          whole.storage_offset() + static_cast<std::int64_t>(piece.first_element));
}

std::vector<at::Tensor> OptimizerState::saved_states(ParamId param) const {
  if (!copied(param) || shards_.ranks() > 1) {
    return places_.shown(layout_.place(param).chunk) ? views(param) : read(param);
  }
  std::vector<at::Tensor> states = saved_states_of_piece(param);
  for (std::size_t i = 0; i < states.size(); ++i) {
    states[i] = in_shape(states[i], geometry(param, specs(param)[i]));
  }
  return states;
}

std::optional<at::Tensor> OptimizerState::saved_master(ParamId param) const {
  if (!copied(param) || shards_.ranks() > 1) {
    return master(param, [&] { return saved_weights(param).to(at::kCPU); });
  }
  std::optional<at::Tensor> master = saved_master_of_piece(param);
  if (master) {
    master = in_shape(*master, geometry_of(params_[index(param)].local));
  }
  return master;
}

std::vector<at::Tensor> OptimizerState::saved_states_of_piece(ParamId param) const {
  const at::NoGradGuard no_grad;
  const Piece piece = shards_.piece(param);
  std::vector<at::Tensor> states;
  if (copied(param)) {
    for (std::size_t i = 0; i < specs(param).size(); ++i) {
      states.push_back(
          tensor_of(copies_.piece(param, rule_payload(i)), to_torch(specs(param)[i].type)));
    }
    return states;
  }
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kRead, [&](const ChunkMemory& memory) {
        for (std::size_t i = 0; i < specs(param).size(); ++i) {
          const PayloadKind kind = rule_payload(i);
          const at::ScalarType type = to_torch(specs(param)[i].type);
          const std::size_t bytes = places_.bytes(param, kind, piece.numel);
          at::Tensor& copy = states.emplace_back(at::empty(
              {static_cast<std::int64_t>(bytes / at::elementSize(type))}, at::dtype(type)));
          if (bytes > 0) {
            std::memcpy(copy.mutable_data_ptr(),
                        places_.element(memory, param, kind, piece.first_element), bytes);
          }
        }
      });
  return states;
}

std::optional<at::Tensor> OptimizerState::saved_master_of_piece(ParamId param) const {
  if (!has_master(param)) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  const bool whole = places_.has(param, kMasterPayload);
  if (copied(param) && whole) {
    return tensor_of(copies_.piece(param, kMasterPayload), at::kFloat);
  }
  const Piece piece = shards_.piece(param);
  at::Tensor values = at::empty({static_cast<std::int64_t>(piece.numel)}, at::kFloat);
  if (piece.numel == 0) {
    return values;
  }
  const at::Tensor weights = saved_weights_of_piece(param).to(at::kCPU);
  const auto join = [&](const std::int16_t* remainders) {
    join_masters(&executor_, values.mutable_data_ptr<float>(),
                 static_cast<const std::uint16_t*>(weights.const_data_ptr()), remainders,
                 piece.numel);
  };
  if (copied(param)) {
    join(reinterpret_cast<const std::int16_t*>(copies_.piece(param, kRemainderPayload).data.get()));
    return values;
  }
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kRead, [&](const ChunkMemory& memory) {
        const std::size_t first = piece.first_element;
        if (const auto* const master = places_.data<float>(memory, param, kMasterPayload, first)) {
          std::memcpy(values.mutable_data_ptr(), master, values.nbytes());
        } else {
          join(places_.data<std::int16_t>(memory, param, kRemainderPayload, first));
        }
      });
  return values;
}

std::vector<at::Tensor> OptimizerState::read(ParamId param) const {
  std::vector<at::Tensor> states;
  for (const StateSpec& spec : specs(param)) {
    const ParamGeometry shape = geometry(param, spec);
    states.push_back(at::empty_strided(shape.sizes, shape.strides,
                                       at::TensorOptions().dtype(to_torch(spec.type))));
  }
  for (std::size_t i = 0; i < states.size(); ++i) {
    with_state(param, rule_payload(i), [&](const std::byte* state) {
      std::memcpy(states[i].mutable_data_ptr(), state, states[i].nbytes());
    });
  }
  return states;
}

// All of a parameter's: the host's memory of it, or a copy of what every rank has.
void OptimizerState::with_state(ParamId param, PayloadKind kind,
                                const std::function<void(const std::byte*)>& use) const {
  if (ranks_ != nullptr) {
    use(ranks_->read(param, kind).data());
    return;
  }
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kRead,
      [&](const ChunkMemory& memory) { use(places_.element(memory, param, kind)); });
}

void OptimizerState::write(ParamId param, std::span<const at::Tensor> states) {
  if (states.size() != specs(param).size()) {
    throw InvalidArgument("parameter '" + layout_.param(param).name + "' has " +
                          std::to_string(specs(param).size()) + " states, and " +
                          std::to_string(states.size()) + " were given");
  }
  for (std::size_t i = 0; i < states.size(); ++i) {
    const ParamGeometry shape = geometry(param, specs(param)[i]);
    if (states[i].sizes() != shape.sizes || states[i].strides() != shape.strides ||
        states[i].scalar_type() != to_torch(specs(param)[i].type)) {
      throw InvalidArgument(std::string(specs(param)[i].plural) + " of parameter '" +
                            layout_.param(param).name +
                            "' differ in shape, strides or type from what read gives");
    }
  }
  const Piece own = shards_.piece(param);
  places_.with_states(
      layout_.place(param).chunk, StreamAccess::kEdit, [&](const ChunkMemory& memory) {
        for (std::size_t i = 0; i < states.size() && own.numel > 0; ++i) {
          const PayloadKind kind = rule_payload(i);
          const auto* const values = static_cast<const std::byte*>(states[i].const_data_ptr());
          std::memcpy(places_.element(memory, param, kind, own.first_element),
                      values + places_.bytes(param, kind, own.first_element),
                      places_.bytes(param, kind, own.numel));
        }
      });
}

}  // namespace castor
