#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/chunk_layout.h"
#include "core/collectives.h"
#include "core/overlap.h"
#include "core/placement.h"
#include "core/runtime.h"
#include "core/scalar_type.h"
#include "store/device_backend.h"
#include "store/optimizer_state_options.h"
#include "store/shared_budgets.h"

namespace castor {

struct SessionOptions {
  ScalarType precision = ScalarType::kFloat32;
  LayoutOptions layout;
  PlacementOptions placement;
  RuntimeOptions runtime;
  /// Budgets that the session takes from, with the other sessions that have them.
  std::shared_ptr<SharedBudgets> budgets;
  /// Name of the model, for errors.
  std::string name;
  /// Backend of the device, of this session alone.
  std::shared_ptr<DeviceBackend> backend;
  OptimizerStateOptions state;
  /// Marks of the parameters of which passes may read single rows (ParamSpec::by_row). Empty: none.
  std::vector<bool> by_row;
  Overlap overlap = Overlap::kNone;
  /// Number of threads that update, copy and convert; 0: as many as there are cores.
  std::size_t num_threads = 0;
  /// Lowest ZeRO stage by which the ranks may shard: 1, 2 or 3, as GeminiPlugin; 0: any.
  std::size_t zero_stage = 0;
  /// Number of replicas of sharded weights, each sharded over as many ranks: as GeminiPlugin.
  std::size_t extra_dp_size = 1;
  /// Groups of the ranks that train the model; nullopt where this process is alone.
  std::optional<RankGroups> ranks;
  /// Function that tells other ranks the pass ("forward") and the name of the module that this one
  /// has entered, for their messages. Empty where nobody listens.
  std::function<void(std::string_view pass, std::string_view module)> entered;
};

}  // namespace castor
