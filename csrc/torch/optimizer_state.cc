#include "torch/optimizer_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"
#include "optim/convert.h"
#include "optim/state_convert.h"
#include "torch/chunk_storages.h"

namespace castor {
namespace {

constexpr std::int64_t kPieceNumel = std::int64_t{1} << 20;

bool in_blocks(StateFormat format) { return format == StateFormat::kSplitInt8; }

at::ScalarType moment_type(StateFormat format) {
  switch (state_bytes(format).exp_avg) {
    case 1: return at::kByte;
    case 2: return at::kBFloat16;
    default: return at::kFloat;
  }
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

std::size_t numel_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

}  // namespace

std::size_t param_alignment(StateFormat format, ScalarType precision) {
  return in_blocks(format) ? kMomentBlock * size_of(precision) : kParamAlignment;
}

OptimizerState::OptimizerState(ChunkManager& manager, std::span<const at::Tensor> params,
                               Executor& executor, const OptimizerStateOptions& options)
    : manager_(manager),
      layout_(manager.layout()),
      params_(params),
      executor_(executor),
      format_(options.format),
      streams_(params.size(), 0) {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    if (layout_.chunks()[i].trainable) {
      add_payloads(ChunkId{static_cast<std::uint32_t>(i)}, options.moments);
    }
  }
}

void OptimizerState::add_payloads(ChunkId chunk, bool moments) {
  const ChunkSpec& spec = layout_.chunk(chunk);
  if (format_ != StateFormat::kFp32 && spec.type != ScalarType::kBFloat16) {
    throw InvalidArgument("optimizer state format " + std::string(to_string(format_)) +
                          " splits the fp32 master of bfloat16 parameters, and chunk " +
                          std::to_string(index(chunk)) + " holds " +
                          std::string(to_string(spec.type)) + "; use format fp32");
  }
  if (spec.used_bytes % param_alignment(format_, spec.type) != 0) {
    throw InvalidArgument(
        "chunk " + std::to_string(index(chunk)) + " of " + std::to_string(spec.used_bytes) +
        " bytes is not aligned to " + std::to_string(param_alignment(format_, spec.type)) +
        ", which optimizer state format " + std::string(to_string(format_)) + " needs");
  }
  const std::size_t numel = spec.used_bytes / size_of(spec.type);
  const auto add = [&](PayloadKind kind) {
    manager_.add_payload(chunk, kind, payload_bytes(chunk, kind, numel));
  };
  if (format_ != StateFormat::kFp32) {
    add(PayloadKind::kRemainder);
  } else if (spec.type != ScalarType::kFloat32) {
    add(PayloadKind::kMaster);
  }
  if (moments) {
    add(PayloadKind::kExpAvg);
    add(PayloadKind::kExpAvgSq);
    if (in_blocks(format_)) {
      add(PayloadKind::kMomentScales);
    }
  }
}

// Of the first `numel` elements of a chunk.
std::size_t OptimizerState::payload_bytes(ChunkId chunk, PayloadKind kind,
                                          std::size_t numel) const {
  const StateBytes bytes = state_bytes(format_);
  switch (kind) {
    case PayloadKind::kParam:
    case PayloadKind::kGrad: return numel * size_of(layout_.chunk(chunk).type);
    case PayloadKind::kMaster: return numel * bytes.master;
    case PayloadKind::kRemainder: return numel * bytes.remainder;
    case PayloadKind::kExpAvg: return numel * bytes.exp_avg;
    case PayloadKind::kExpAvgSq: return numel * bytes.exp_avg_sq;
    case PayloadKind::kMomentScales: return num_moment_blocks(numel) * sizeof(MomentScales);
  }
  return 0;
}

std::byte* OptimizerState::element(ParamId param, PayloadKind kind) const {
  const ParamPlace place = layout_.place(param);
  const auto& payload = manager_.payload(place.chunk, kind);
  return payload ? payload->data() + payload_bytes(place.chunk, kind, place.offset) : nullptr;
}

void OptimizerState::adopt(ParamId param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const ScalarType type = layout_.param(param).type;
  auto* home = element(param, PayloadKind::kParam);
  auto* master = data<float>(param, PayloadKind::kMaster);
  auto* remainder = data<std::int16_t>(param, PayloadKind::kRemainder);
  const at::Tensor& own = params_[index(param)];
  if (master == nullptr && remainder == nullptr) {
    const ParamGeometry geometry = geometry_of(own);
    at::from_blob(home, geometry.sizes, geometry.strides, to_torch(type)).copy_(values);
    return;
  }
  for_each_piece(in_order_of(own, values), [&](std::size_t begin, const at::Tensor& piece) {
    const at::Tensor exact = piece.to(at::kFloat).contiguous();
    const std::size_t numel = numel_of(piece);
    if (master != nullptr) {
      std::memmove(master + begin, exact.const_data_ptr<float>(), numel * sizeof(float));
    }
    if (remainder != nullptr) {
      split_masters(&executor_, remainder + begin, exact.const_data_ptr<float>(), numel);
    }
    master_to_param(&executor_, home + begin * size_of(type), exact.const_data_ptr<float>(), numel,
                    type);
  });
}

bool OptimizerState::set_master(ParamId param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  auto* master = data<float>(param, PayloadKind::kMaster);
  auto* remainder = data<std::int16_t>(param, PayloadKind::kRemainder);
  if (master == nullptr && remainder == nullptr) {
    return false;
  }
  for_each_piece(in_order_of(params_[index(param)], values), [&](std::size_t begin,
                                                                 const at::Tensor& piece) {
    const at::Tensor exact = piece.to(at::kFloat).contiguous();
    if (master != nullptr) {
      std::memmove(master + begin, exact.const_data_ptr<float>(), exact.nbytes());
    } else {
      split_masters(&executor_, remainder + begin, exact.const_data_ptr<float>(), numel_of(piece));
    }
  });
  return true;
}

void OptimizerState::zero_moments() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    for (const PayloadKind kind :
         {PayloadKind::kExpAvg, PayloadKind::kExpAvgSq, PayloadKind::kMomentScales}) {
      if (const auto& moments = manager_.payload(ChunkId{static_cast<std::uint32_t>(i)}, kind)) {
        std::memset(moments->data(), 0, moments->bytes());
      }
    }
  }
}

void OptimizerState::set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams) {
  if (streams.size() != params_.size()) {
    throw InvalidArgument("there are " + std::to_string(streams.size()) + " rounding streams for " +
                          std::to_string(params_.size()) + " parameters");
  }
  seed_ = seed;
  streams_ = std::move(streams);
}

AdamSegment OptimizerState::segment(ParamId param, const AdamOptions& options, std::int64_t step,
                                    double grad_scale) const {
  const ParamSpec& spec = layout_.param(param);
  AdamSegment segment{.exp_avg = element(param, PayloadKind::kExpAvg),
                      .exp_avg_sq = element(param, PayloadKind::kExpAvgSq),
                      .grad = element(param, PayloadKind::kGrad),
                      .type = spec.type,
                      .numel = spec.numel,
                      .coefficients = AdamCoefficients(options, step, grad_scale),
                      .format = format_,
                      .remainder = data<std::int16_t>(param, PayloadKind::kRemainder),
                      .scales = data<MomentScales>(param, PayloadKind::kMomentScales),
                      .rounding = RoundingKey(seed_, streams_[index(param)], step)};
  if (spec.type == ScalarType::kFloat32) {
    segment.master = data<float>(param, PayloadKind::kParam);
  } else {
    segment.master = data<float>(param, PayloadKind::kMaster);
    segment.param = element(param, PayloadKind::kParam);
  }
  return segment;
}

void OptimizerState::before_write_back(ChunkId chunk, const std::byte* home,
                                       const std::byte* slot) {
  if (const auto& remainder = manager_.payload(chunk, PayloadKind::kRemainder)) {
    forget_remainders(&executor_, reinterpret_cast<std::int16_t*>(remainder->data()),
                      reinterpret_cast<const std::uint16_t*>(home),
                      reinterpret_cast<const std::uint16_t*>(slot),
                      remainder->bytes() / sizeof(std::int16_t));
  }
}

void OptimizerState::before_overwrite(ParamId param, const at::Tensor& values) {
  auto* remainder = data<std::int16_t>(param, PayloadKind::kRemainder);
  if (remainder == nullptr) {
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor& own = params_[index(param)];
  // In the order of the parameter's memory, and rounded as the copy will round.
  const at::Tensor after = at::empty_like(own).copy_(values);
  forget_remainders(&executor_, remainder, static_cast<const std::uint16_t*>(own.const_data_ptr()),
                    static_cast<const std::uint16_t*>(after.const_data_ptr()), numel_of(own));
}

at::Tensor OptimizerState::view(ParamId param, PayloadKind kind, at::ScalarType type) const {
  const ParamPlace place = layout_.place(param);
  return tensor_over(storage_over(manager_.payload(place.chunk, kind)), type, place.offset,
                     geometry_of(params_[index(param)]));
}

std::vector<at::Tensor> OptimizerState::moments(ParamId param) const {
  if (element(param, PayloadKind::kExpAvg) == nullptr) {
    return {};
  }
  return {view(param, PayloadKind::kExpAvg, moment_type(format_)),
          view(param, PayloadKind::kExpAvgSq, moment_type(format_))};
}

std::optional<at::Tensor> OptimizerState::moment_scales(ParamId param) const {
  const ParamPlace place = layout_.place(param);
  const auto& payload = manager_.payload(place.chunk, PayloadKind::kMomentScales);
  if (!payload) {
    return std::nullopt;
  }
  const auto num_blocks = static_cast<std::int64_t>(num_moment_blocks(layout_.param(param).numel));
  return tensor_over(storage_over(payload), at::kFloat, 2 * (place.offset / kMomentBlock),
                     {.sizes = {num_blocks, 2}, .strides = {2, 1}});
}

std::optional<at::Tensor> OptimizerState::master_view(ParamId param) const {
  if (element(param, PayloadKind::kMaster) == nullptr) {
    return std::nullopt;
  }
  return view(param, PayloadKind::kMaster, at::kFloat);
}

std::optional<at::Tensor> OptimizerState::master(ParamId param) const {
  const auto* remainder = data<std::int16_t>(param, PayloadKind::kRemainder);
  if (remainder == nullptr) {
    return master_view(param);
  }
  const at::NoGradGuard no_grad;
  const at::Tensor& own = params_[index(param)];
  at::Tensor joined = at::empty_like(own, at::kFloat);
  join_masters(&executor_, joined.mutable_data_ptr<float>(),
               static_cast<const std::uint16_t*>(own.const_data_ptr()), remainder, numel_of(own));
  return joined;
}

}  // namespace castor
