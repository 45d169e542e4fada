#include "torch/optimizer_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "store/tensor_errors.h"
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
    throw tensor_errors::values_of_other_shape({values.numel(), values.dim()},
                                               {param.numel(), param.dim()});
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

/// Values as fp32 on the host.
at::Tensor exact(const at::Tensor& values) { return values.to(at::kCPU, at::kFloat).contiguous(); }

std::span<const float> floats(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

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
      copies_(copies),
      values_(manager, shards, places, executor, std::move(rule), copies, ranks) {}

at::Tensor OptimizerState::on_host(ParamId param) const {
  const at::Tensor& own = params_[index(param)].local;
  return places_.device().computes_by_itself() ? own.to(at::kCPU) : own;
}

void OptimizerState::adopt(ParamId param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const ScalarType type = layout_.param(param).type;
  const at::Tensor& own = params_[index(param)].local;
  if (!values_.has_master(param)) {
    const ParamGeometry geometry = geometry_of(own);
    places_.with_host_storage(param, [&](std::byte* host) {
      at::from_blob(host, geometry.sizes, geometry.strides, castor::to_torch(type)).copy_(values);
    });
    return;
  }
  const auto adopt_at = [&](const ChunkMemory& memory, std::byte* host) {
    for_each_piece(in_order_of(own, values), [&](std::size_t begin, const at::Tensor& piece) {
      const at::Tensor master = exact(piece);
      values_.write_master(memory, param, begin, floats(master));
      values_.write_rounded(host, param, begin, floats(master));
    });
  };
  values_.edit(param, [&](const ChunkMemory& memory) {
    places_.with_host_storage(param, [&](std::byte* host) { adopt_at(memory, host); });
  });
}

bool OptimizerState::set_master(ParamId param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  if (!values_.has_master(param)) {
    return false;
  }
  values_.edit(param, [&](const ChunkMemory& memory) {
    for_each_piece(in_order_of(params_[index(param)].local, values),
                   [&](std::size_t begin, const at::Tensor& piece) {
                     values_.write_master(memory, param, begin, floats(exact(piece)));
                   });
  });
  return true;
}

void OptimizerState::zero() {
  values_.zero([this](const Payload& payload) {
    bytes_at(payload.data(), payload.bytes(), to_torch(places_.device().id())).zero_();
  });
}

void OptimizerState::before_overwrite(ParamId param, const at::Tensor& values) {
  places_.check_writable(param);
  if (!values_.splits_master(param)) {
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor own = on_host(param);
  // In the order of the parameter's memory, and rounded as the copy will round.
  const at::Tensor after = empty_as(own, own.scalar_type()).copy_(values);
  values_.forget_changed(param, own.const_data_ptr(), after.const_data_ptr());
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
  for (std::size_t i = 0; i < values_.specs(param).size(); ++i) {
    const auto& payload = manager_.payload(place.chunk, rule_payload(i));
    if (!payload) {
      return {};
    }
    const StateSpec& spec = values_.specs(param)[i];
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
  if (!values_.has_master(param)) {
    return std::nullopt;
  }
  if (auto shown = master_view(param)) {
    return shown;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor own = weights_on_host();
  at::Tensor values = empty_as(own, at::kFloat);
  values_.read_master(param, static_cast<std::size_t>(own.numel()), own.const_data_ptr(),
                      values.mutable_data_ptr<float>());
  return values;
}

at::Tensor OptimizerState::saved_weights(ParamId param) const {
  const ParamPlace place = layout_.place(param);
  const ParamGeometry geometry = geometry_of(params_[index(param)].local);
  const at::ScalarType type = castor::to_torch(layout_.param(param).type);
  if (values_.copied(param)) {
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
  if (values_.copied(param)) {
    return tensor_of(copies_.piece(param, PayloadKind::kParam),
                     castor::to_torch(layout_.param(param).type));
  }
  const at::Tensor whole = saved_weights(param);
  return whole.as_strided({numel}, {1},
                          whole.storage_offset() + static_cast<std::int64_t>(piece.first_element));
}

std::vector<at::Tensor> OptimizerState::saved_states(ParamId param) const {
  if (!values_.copied(param) || shards_.ranks() > 1) {
    return places_.shown(layout_.place(param).chunk) ? views(param) : read(param);
  }
  std::vector<at::Tensor> states = saved_states_of_piece(param);
  for (std::size_t i = 0; i < states.size(); ++i) {
    states[i] = in_shape(states[i], geometry(param, values_.specs(param)[i]));
  }
  return states;
}

std::optional<at::Tensor> OptimizerState::saved_master(ParamId param) const {
  if (!values_.copied(param) || shards_.ranks() > 1) {
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
  std::vector<at::Tensor> states;
  if (values_.copied(param)) {
    for (std::size_t i = 0; i < values_.specs(param).size(); ++i) {
      states.push_back(
          tensor_of(copies_.piece(param, rule_payload(i)), to_torch(values_.specs(param)[i].type)));
    }
    return states;
  }
  values_.read_pieces(param, [&](std::size_t state, std::size_t bytes) {
    const at::ScalarType type = to_torch(values_.specs(param)[state].type);
    const auto numel = static_cast<std::int64_t>(bytes / at::elementSize(type));
    return states.emplace_back(at::empty({numel}, at::dtype(type))).mutable_data_ptr();
  });
  return states;
}

std::optional<at::Tensor> OptimizerState::saved_master_of_piece(ParamId param) const {
  if (!values_.has_master(param)) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  if (values_.copied(param) && values_.has_full_master(param)) {
    return tensor_of(copies_.piece(param, kMasterPayload), at::kFloat);
  }
  const Piece piece = shards_.piece(param);
  at::Tensor values = at::empty({static_cast<std::int64_t>(piece.numel)}, at::kFloat);
  if (piece.numel > 0) {
    const at::Tensor weights = saved_weights_of_piece(param).to(at::kCPU);
    values_.read_master_piece(param, weights.const_data_ptr(), values.mutable_data_ptr<float>());
  }
  return values;
}

std::vector<at::Tensor> OptimizerState::read(ParamId param) const {
  std::vector<at::Tensor> states;
  for (const StateSpec& spec : values_.specs(param)) {
    const ParamGeometry shape = geometry(param, spec);
    states.push_back(at::empty_strided(shape.sizes, shape.strides,
                                       at::TensorOptions().dtype(to_torch(spec.type))));
  }
  for (std::size_t i = 0; i < states.size(); ++i) {
    values_.read(param, i, states[i].mutable_data_ptr());
  }
  return states;
}

void OptimizerState::write(ParamId param, std::span<const at::Tensor> states) {
  if (states.size() != values_.specs(param).size()) {
    throw tensor_errors::other_number_of_states(layout_.param(param).name,
                                                values_.specs(param).size(), states.size());
  }
  for (std::size_t i = 0; i < states.size(); ++i) {
    const ParamGeometry shape = geometry(param, values_.specs(param)[i]);
    if (states[i].sizes() != shape.sizes || states[i].strides() != shape.strides ||
        states[i].scalar_type() != to_torch(values_.specs(param)[i].type)) {
      throw tensor_errors::states_of_other_layout(layout_.param(param).name,
                                                  values_.specs(param)[i].plural);
    }
  }
  std::vector<const std::byte*> values;
  for (const at::Tensor& state : states) {
    values.push_back(static_cast<const std::byte*>(state.const_data_ptr()));
  }
  values_.write(param, values);
}

}  // namespace castor
