#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/scalar_type.h"

namespace castor {

/// What a layout is told of a model's parameters, in their order. `trained[i]`: parameter i gets
/// updates; `ruled[i]`: by the rule, whose states it has; `types[i]`: what it will be, nullopt: it
/// keeps its bytes. `ruled` may be empty: all are. Throws InvalidArgument where there are not as
/// many of each, or chunks hold no such elements.
[[nodiscard]] std::vector<ParamSpec> describe(const std::vector<at::Tensor>& params,
                                              std::vector<std::string> names,
                                              const std::vector<bool>& trained,
                                              const std::vector<bool>& ruled,
                                              const std::vector<std::optional<ScalarType>>& types);

}  // namespace castor
