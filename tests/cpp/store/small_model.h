#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_layout.h"
#include "optim/adam_rule.h"
#include "store/state_store.h"

namespace castor::testing {

inline std::shared_ptr<const UpdateRule> adam(StateFormat format = StateFormat::kFp32) {
  return make_update_rule("adam", format);
}

/// Options of AdamRule, in their order.
inline RuleOptions adam_options(double lr = 1e-2, double weight_decay = 0.0) {
  return {lr, 0.9, 0.999, 1e-8, weight_decay, 1.0, 0.0};
}

/// Builds the layout of a model without modules, for an update rule and some ranks.
struct SmallModel {
  std::vector<ParamSpec> params;

  SmallModel& add(std::size_t numel, ScalarType type = ScalarType::kFloat32, bool trainable = true,
                  bool has_state = true) {
    params.push_back({.name = "p" + std::to_string(params.size()),
                      .numel = numel,
                      .type = type,
                      .trainable = trainable,
                      .has_state = has_state});
    return *this;
  }
  [[nodiscard]] ChunkLayout layout(std::size_t chunk_bytes, const UpdateRule* rule = nullptr,
                                   std::size_t ranks = 1) const {
    std::size_t alignment = kParamAlignment;
    for (const ParamSpec& param : params) {
      alignment = std::max(alignment, param_alignment(rule, param.type));
    }
    return ChunkLayout(
        params, {},
        {.chunk_bytes = chunk_bytes, .world_size = ranks, .param_alignment = alignment});
  }
  /// `count` chunks with one parameter each, of `numel` elements.
  [[nodiscard]] static SmallModel row(std::size_t count, std::size_t numel,
                                      ScalarType type = ScalarType::kFloat32) {
    SmallModel model;
    for (std::size_t i = 0; i < count; ++i) {
      model.add(numel, type);
    }
    return model;
  }
};

}  // namespace castor::testing
