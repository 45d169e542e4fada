#include "torch/optimizer_state.h"

#include <ATen/ATen.h>

#include <cstring>
#include <utility>

#include "optim/convert.h"
#include "torch/chunk_storages.h"

namespace castor {

OptimizerState::OptimizerState(ChunkManager& manager, std::span<const at::Tensor> params,
                               Executor& executor, bool with_moments)
    : manager_(manager), layout_(manager.layout()), params_(params), executor_(executor) {
  add_payloads(with_moments);
}

void OptimizerState::add_payloads(bool with_moments) {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const ChunkSpec& spec = layout_.chunk(chunk);
    if (!spec.trainable) {
      continue;
    }
    const std::size_t numel = spec.used_bytes / size_of(spec.type);
    const auto add = [&](PayloadKind kind) {
      manager_.add_payload(chunk, kind, numel * element_bytes(chunk, kind));
    };
    if (spec.type != ScalarType::kFloat32) {
      add(PayloadKind::kMaster);
    }
    if (with_moments) {
      add(PayloadKind::kExpAvg);
      add(PayloadKind::kExpAvgSq);
    }
  }
}

std::size_t OptimizerState::element_bytes(ChunkId chunk, PayloadKind kind) const {
  const bool working = kind == PayloadKind::kParam || kind == PayloadKind::kGrad;
  return working ? size_of(layout_.chunk(chunk).type) : sizeof(float);
}

std::byte* OptimizerState::element(ParamId param, PayloadKind kind) const {
  const ParamPlace place = layout_.place(param);
  const auto& payload = manager_.payload(place.chunk, kind);
  return payload ? payload->data() + place.offset * element_bytes(place.chunk, kind) : nullptr;
}

void OptimizerState::adopt(ParamId param, const at::Tensor& values) {
  const ParamSpec& spec = layout_.param(param);
  const ParamGeometry geometry = geometry_of(values);
  auto* home = data<void>(param, PayloadKind::kParam);
  auto* master = data<float>(param, PayloadKind::kMaster);
  const auto copy_to = [&](void* memory, at::ScalarType type) {
    at::from_blob(memory, geometry.sizes, geometry.strides, type).copy_(values);
  };
  if (master == nullptr) {
    copy_to(home, to_torch(spec.type));
    return;
  }
  copy_to(master, at::kFloat);
  master_to_param(&executor_, home, master, spec.numel, spec.type);
}

void OptimizerState::zero_moments() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    for (const PayloadKind kind : {PayloadKind::kExpAvg, PayloadKind::kExpAvgSq}) {
      if (const auto& moments = manager_.payload(ChunkId{static_cast<std::uint32_t>(i)}, kind)) {
        std::memset(moments->data(), 0, moments->bytes());
      }
    }
  }
}

AdamSegment OptimizerState::segment(ParamId param, const AdamOptions& options, std::int64_t step,
                                    double grad_scale) const {
  const ParamSpec& spec = layout_.param(param);
  auto* master = data<float>(param, PayloadKind::kMaster);
  return {.master = master ? master : data<float>(param, PayloadKind::kParam),
          .exp_avg = element(param, PayloadKind::kExpAvg),
          .exp_avg_sq = element(param, PayloadKind::kExpAvgSq),
          .grad = element(param, PayloadKind::kGrad),
          .param = master ? element(param, PayloadKind::kParam) : nullptr,
          .type = spec.type,
          .numel = spec.numel,
          .coefficients = AdamCoefficients(options, step, grad_scale)};
}

std::optional<at::Tensor> OptimizerState::view(ParamId param, PayloadKind kind) const {
  const ParamPlace place = layout_.place(param);
  const auto& payload = manager_.payload(place.chunk, kind);
  if (!payload) {
    return std::nullopt;
  }
  return tensor_over(storage_over(payload), at::kFloat, place.offset,
                     geometry_of(params_[index(param)]));
}

std::vector<at::Tensor> OptimizerState::moments(ParamId param) const {
  std::vector<at::Tensor> views;
  for (const PayloadKind kind : {PayloadKind::kExpAvg, PayloadKind::kExpAvgSq}) {
    if (auto moment = view(param, kind)) {
      views.push_back(*std::move(moment));
    }
  }
  return views;
}

std::optional<at::Tensor> OptimizerState::master(ParamId param) const {
  return view(param, PayloadKind::kMaster);
}

}  // namespace castor
