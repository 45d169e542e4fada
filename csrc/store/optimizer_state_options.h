#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "io/nvme_tier.h"
#include "optim/update_rule.h"

namespace castor {

/// Share of the updates of chunks in host memory that run on the device (DeviceUpdates).
struct DeviceShare {
  /// Fraction of the elements, in [0, 1]. If it `adapts`, the one to begin with.
  double fraction = 0.0;
  /// Whether the fraction follows the times that host and device take.
  bool adapts = false;
};

struct OptimizerStateOptions {
  /// Update rule; nullptr: another optimizer updates the parameters, which are fp32, and keeps its
  /// states itself.
  std::shared_ptr<const UpdateRule> rule;
  /// Marks of the parameters that the rule updates; other optimizers update the rest. Empty: all.
  std::vector<bool> ruled;
  /// Options of the NVMe tier, which takes the states of chunks that the host has no room for.
  /// nullopt: there is no such tier.
  std::optional<NvmeOptions> nvme;
  /// Share of the state bytes that go to NVMe whether the host has room or not, in [0, 1].
  double nvme_fraction = 0.0;
  DeviceShare device_share;
};

}  // namespace castor
