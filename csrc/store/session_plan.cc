#include "store/session_plan.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/runtime.h"
#include "core/units.h"
#include "store/device_gradients.h"
#include "store/state_store.h"

namespace castor {
namespace {

/// Returns the device bytes that a rank needs to reduce gradients there. No chunk counts as one
/// that is on the device for good.
std::size_t reduction_bytes(const RankGroups& ranks, const ChunkLayout& layout) {
  const DeviceGradients::Buffers buffers = DeviceGradients::most_buffers(layout);
  return ranks.communicator_bytes + ranks.sums->window_bytes(buffers.bytes) + buffers.total_bytes();
}

void choose_where_to_reduce(RankGroups& ranks, const ChunkLayout& layout, SharedBudgets& budgets) {
  const std::size_t needed = reduction_bytes(ranks, layout);
  std::size_t allowed = ranks.most_reduction_bytes;
  if (allowed != RankGroups::kAnyBytes) {
    allowed = std::min(allowed, budgets.device()->available());  // other models may have the rest
  }
  const auto needs = gather(*ranks.passes, std::array{needed, allowed});
  for (const auto& [bytes, most] : needs) {
    if (bytes > most && ranks.sums) {
      ranks.reduces_on_host = "on the devices it takes " + format_bytes(bytes) +
                              " of device_memory, and reduce_on='auto' takes no more than " +
                              format_bytes(most);
      ranks.sums->leave();
      ranks.gathers->leave();
      ranks.sums = ranks.gathers = nullptr;
    }
  }
  if (ranks.sums) {
    ranks.communicators =
        std::make_shared<Reservation>(budgets.take_communicators(ranks.communicator_bytes));
  }
}

}  // namespace

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
  if (left.ranks && left.ranks->sums) {
    choose_where_to_reduce(*left.ranks, layout, *options.budgets);
  }
  return {
      .layout = std::move(layout), .placements = std::move(placements), .options = std::move(left)};
}

}  // namespace castor
