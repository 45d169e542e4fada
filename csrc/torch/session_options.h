#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/chunk_layout.h"
#include "core/collectives.h"
#include "core/overlap.h"
#include "core/placement.h"
#include "core/runtime.h"
#include "core/scalar_type.h"
#include "torch/device_backend.h"
#include "torch/optimizer_state_options.h"

namespace castor {

struct SessionOptions {
  ScalarType precision = ScalarType::kFloat32;
  LayoutOptions layout;
  PlacementOptions placement;
  RuntimeOptions runtime;
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
  /// Bandwidth of an emulated link between host and device, each way; 0: memory's own.
  std::uint64_t link_bytes_per_second = 0;
  /// The device that computes; nullptr: the CPU device.
  std::shared_ptr<DeviceBackend> backend;
  OptimizerStateOptions state;
  Overlap overlap = Overlap::kNone;
  /// The ranks that train the model together; nullptr: this process is alone.
  std::shared_ptr<Collectives> ranks;
};

}  // namespace castor
