#include "torch/param_specs.h"

#include <ATen/ATen.h>

#include <utility>

#include "core/error.h"
#include "torch/chunk_storages.h"

namespace castor {
namespace {

ScalarType own_type(const at::Tensor& param) {
  for (const ScalarType type :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16, ScalarType::kUInt8}) {
    if (to_torch(type) == param.scalar_type()) {
      return type;
    }
  }
  throw InvalidArgument(std::string("chunks hold no elements of type ") +
                        toString(param.scalar_type()));
}

}  // namespace

std::vector<ParamSpec> describe(const std::vector<at::Tensor>& params,
                                std::vector<std::string> names, const std::vector<bool>& trained,
                                const std::vector<bool>& ruled,
                                const std::vector<std::optional<ScalarType>>& types) {
  if (params.size() != names.size() || params.size() != trained.size() ||
      params.size() != types.size() || (!ruled.empty() && params.size() != ruled.size())) {
    throw InvalidArgument("there are " + std::to_string(params.size()) + " parameters but " +
                          std::to_string(names.size()) + " names and " +
                          std::to_string(trained.size()) + " marks of what is trained");
  }
  std::vector<ParamSpec> specs;
  specs.reserve(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    specs.push_back({.name = std::move(names[i]),
                     .numel = static_cast<std::size_t>(params[i].numel()),
                     .type = types[i] ? *types[i] : own_type(params[i]),
                     .trainable = trained[i],
                     .has_state = ruled.empty() || ruled[i]});
  }
  return specs;
}

}  // namespace castor
