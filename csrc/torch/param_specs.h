#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/scalar_type.h"

namespace castor {

/// Returns the specs of a model's parameters for a layout, in their order. `trained[i]`: parameter
/// i gets updates. `ruled[i]`: it gets them from the update rule, and has that rule's states;
/// empty: all do. `types[i]`: the type that it will have; nullopt: it keeps its bytes. Throws
/// InvalidArgument where there are not as many of each, or chunks hold no such elements.
[[nodiscard]] std::vector<ParamSpec> describe(const std::vector<at::Tensor>& params,
                                              std::vector<std::string> names,
                                              const std::vector<bool>& trained,
                                              const std::vector<bool>& ruled,
                                              const std::vector<std::optional<ScalarType>>& types);

}  // namespace castor
