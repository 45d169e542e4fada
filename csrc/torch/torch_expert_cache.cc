#include "torch/torch_expert_cache.h"

#include <string>
#include <utility>

#include "core/error.h"
#include "torch/chunk_storages.h"
#include "torch/torch_memory.h"

namespace castor {

TorchExpertCache::TorchExpertCache(std::shared_ptr<Session> session,
                                   std::vector<std::vector<ParamId>> layers)
    : session_(std::move(session)),
      layers_(std::move(layers)),
      cache_({.model = *this,
              .layout = session_->layout(),
              .device = session_->memory().device_tier()->ledger(),
              .nonmodel = *session_->memory().nonmodel(),
              .copies = session_->chunks().copies(),
              .compute = session_->memory().device(),
              .take = take_from(session_->torch_device())},
             specs()) {
  session_->runtime().set_spare(&cache_);
}

TorchExpertCache::~TorchExpertCache() { session_->runtime().set_spare(nullptr); }

std::vector<ExpertCache::LayerSpec> TorchExpertCache::specs() const {
  std::vector<ExpertCache::LayerSpec> specs;
  for (const std::vector<ParamId>& params : layers_) {
    ExpertCache::LayerSpec& spec = specs.emplace_back();
    spec.params = params;
    for (const ParamId param : params) {
      const at::Tensor& tensor = session_->parameter(param);
      const std::int64_t num_experts = tensor.dim() == 0 ? 0 : tensor.size(0);
      spec.num_experts = spec.row_bytes.empty() ? num_experts : spec.num_experts;
      if (num_experts != spec.num_experts || num_experts == 0 || !tensor.is_contiguous()) {
        throw InvalidArgument("parameter '" + session_->layout().param(param).name + "' has " +
                              std::to_string(num_experts) + " experts in its first dimension, of " +
                              std::to_string(spec.num_experts) +
                              " in its layer; they have to be as many, and contiguous");
      }
      spec.row_bytes.push_back(tensor.nbytes() / static_cast<std::size_t>(num_experts));
    }
  }
  return specs;
}

std::optional<TorchExpertCache::Rows> TorchExpertCache::fetch(
    std::size_t layer, std::span<const std::int64_t> experts) {
  auto fetched = cache_.fetch(layer, experts);
  if (!fetched) {
    return std::nullopt;
  }
  Rows rows{.params = {}, .places = std::move(fetched->places), .num_places = fetched->num_places};
  for (std::size_t i = 0; i < fetched->params.size(); ++i) {
    const at::Tensor& param = session_->parameter(layers_[layer][i]);
    ParamGeometry geometry{at::DimVector(param.sizes()), at::DimVector(param.strides())};
    geometry.sizes[0] = rows.num_places;
    rows.params.push_back(tensor_over(storage_of(*fetched->params[i]), param.scalar_type(),
                                      /*offset=*/0, geometry));
  }
  return rows;
}

}  // namespace castor
