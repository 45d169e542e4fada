#include "torch/torch_experts.h"

#include "store/tensor_errors.h"
#include "torch/chunk_storages.h"
#include "torch/torch_memory.h"

namespace castor {

TorchExperts::TorchExperts(std::shared_ptr<Session> session,
                           std::span<const std::vector<ParamId>> layers)
    : session_(std::move(session)), layers_(layers_of(layers)), cache_(parts(), layers_) {
  session_->runtime().set_spare(&cache_);
}

TorchExperts::~TorchExperts() { session_->runtime().set_spare(nullptr); }

ExpertParts TorchExperts::parts() {
  return {.model = *this,
          .layout = session_->layout(),
          .device = session_->memory().device_tier()->ledger(),
          .nonmodel = *session_->memory().nonmodel(),
          .copies = session_->chunks().copies(),
          .compute = session_->memory().device(),
          .take = take_from(session_->torch_device())};
}

std::vector<ExpertLayer> TorchExperts::layers_of(
    std::span<const std::vector<ParamId>> layers) const {
  std::vector<ExpertLayer> made;
  for (const std::vector<ParamId>& params : layers) {
    ExpertLayer& layer = made.emplace_back();
    layer.params = params;
    for (const ParamId param : params) {
      const at::Tensor& tensor = session_->parameter(param);
      const std::int64_t num_experts = tensor.dim() == 0 ? 0 : tensor.size(0);
      layer.num_experts = layer.row_bytes.empty() ? num_experts : layer.num_experts;
      if (num_experts != layer.num_experts || num_experts == 0 || !tensor.is_contiguous()) {
        throw tensor_errors::other_experts(session_->layout().param(param).name, num_experts,
                                           layer.num_experts);
      }
      layer.row_bytes.push_back(tensor.nbytes() / static_cast<std::size_t>(num_experts));
    }
  }
  return made;
}

at::Tensor TorchExperts::tensor_of(std::size_t layer, std::size_t position,
                                   const DeviceMemory& memory, std::int64_t num_rows) const {
  const at::Tensor& param = session_->parameter(layers_[layer].params[position]);
  ParamGeometry geometry{at::DimVector(param.sizes()), at::DimVector(param.strides())};
  geometry.sizes[0] = num_rows;
  return tensor_over(storage_of(memory), param.scalar_type(), /*offset=*/0, geometry);
}

std::optional<TorchExperts::Cached> TorchExperts::fetch(std::size_t layer,
                                                        std::span<const std::int64_t> experts) {
  auto fetched = cache_.fetch(layer, experts);
  if (!fetched) {
    return std::nullopt;
  }
  Cached rows{
      .params = {}, .places = std::move(fetched->places), .num_places = fetched->num_places};
  for (std::size_t i = 0; i < fetched->params.size(); ++i) {
    rows.params.push_back(tensor_of(layer, i, *fetched->params[i], rows.num_places));
  }
  return rows;
}

std::shared_ptr<TorchExperts::Rows> TorchExperts::shared(std::size_t layer, std::size_t num_experts,
                                                         std::unique_ptr<ExpertRows> rows) const {
  return rows ? std::make_shared<Rows>(shared_from_this(), layer,
                                       static_cast<std::int64_t>(num_experts), std::move(rows))
              : nullptr;
}

std::shared_ptr<TorchExperts::Rows> TorchExperts::rows(std::size_t layer,
                                                       std::span<const std::int64_t> experts) {
  return shared(layer, experts.size(), ExpertRows::fetch(parts(), layers_.at(layer), experts));
}

std::shared_ptr<TorchExperts::Rows> TorchExperts::rows_ahead(
    std::size_t layer, std::span<const std::int64_t> experts) {
  return shared(layer, experts.size(),
                ExpertRows::fetch_ahead(parts(), layers_.at(layer), experts));
}

void TorchExperts::expect_rows() {
  for (const ExpertLayer& layer : layers_) {
    session_->runtime().expect_rows_of_step(layer.chunks(session_->layout()));
  }
}

at::Tensor TorchExperts::Rows::take(std::size_t position) {
  return experts_->tensor_of(layer_, position, *rows_->take(position), num_experts_);
}

}  // namespace castor
