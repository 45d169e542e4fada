#include "store/session_plan.h"

#include <string>
#include <utility>

#include "core/error.h"
#include "core/runtime.h"
#include "store/state_store.h"

namespace castor {

void check_counts(const ParamCounts& counts) {
  if (counts.params != counts.names || counts.params != counts.trained ||
      counts.params != counts.types) {
    throw InvalidArgument("there are " + std::to_string(counts.params) + " parameters but " +
                          std::to_string(counts.names) + " names and " +
                          std::to_string(counts.trained) + " marks of what is trained");
  }
}

SessionPlan plan_session(std::vector<ParamSpec> params, const std::vector<bool>& trained,
                         std::vector<ModuleSpec> modules, const SessionOptions& options) {
  const std::vector<bool>& ruled = options.state.ruled;
  if (!ruled.empty() && ruled.size() != params.size()) {
    throw InvalidArgument("there are " + std::to_string(params.size()) + " parameters but " +
                          std::to_string(ruled.size()) + " marks of what the update rule updates");
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    params[i].trainable = trained[i];
    params[i].has_state = ruled.empty() || ruled[i];
  }
  for (std::size_t i = 0; i < options.by_row.size(); ++i) {
    params.at(i).by_row = options.by_row[i];
  }
  const UpdateRule* const rule = options.state.rule.get();
  if (const DeviceKernels* const kernels = options.backend->kernels();
      rule != nullptr && kernels != nullptr && !kernels->has(rule->name())) {
    throw InvalidArgument("this device has no kernels for the optimizer '" +
                          std::string(rule->name()) + "'; use device=\"cpu\"");
  }
  LayoutOptions layout_options = options.layout;
  layout_options.param_alignment = param_alignment(rule, options.precision);
  ChunkLayout layout(std::move(params), std::move(modules), layout_options);
  std::vector<Placement> placements = place_chunks(layout, options.placement);
  SessionOptions left = options;
  if (left.state.nvme) {
    left.state.nvme->budget_bytes = options.budgets->nvme()->available();
  }
  Runtime::make_way(*options.budgets->runtimes());
  return {
      .layout = std::move(layout), .placements = std::move(placements), .options = std::move(left)};
}

}  // namespace castor
