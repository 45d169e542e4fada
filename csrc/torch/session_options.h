#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "core/chunk_layout.h"
#include "core/collectives.h"
#include "core/overlap.h"
#include "core/placement.h"
#include "core/runtime.h"
#include "core/scalar_type.h"
#include "torch/device_backend.h"
#include "torch/optimizer_state_options.h"
#include "torch/shared_budgets.h"

namespace castor {

struct SessionOptions {
  ScalarType precision = ScalarType::kFloat32;
  LayoutOptions layout;
  PlacementOptions placement;
  RuntimeOptions runtime;
  /// That the session takes from, with the others that have them.
  std::shared_ptr<SharedBudgets> budgets;
  /// The model's, for errors.
  std::string name;
  /// Of this session alone.
  std::shared_ptr<DeviceBackend> backend;
  OptimizerStateOptions state;
  Overlap overlap = Overlap::kNone;
  /// That update, copy and convert; 0: as many as there are cores.
  std::size_t num_threads = 0;
  /// What several ranks keep parts of at least (ZeRO): 1, 2 or 3, as GeminiPlugin; 0: any.
  std::size_t zero_stage = 0;
  /// Copies of the weights that ranks keep in parts, each over as many of them: as GeminiPlugin.
  std::size_t extra_dp_size = 1;
  /// nullopt: this process is alone.
  std::optional<RankGroups> ranks;
};

}  // namespace castor
