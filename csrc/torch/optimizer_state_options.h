#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "io/nvme_tier.h"
#include "optim/update_rule.h"

namespace castor {

struct OptimizerStateOptions {
  /// nullptr: another optimizer updates the parameters, which are fp32, and keeps its states
  /// itself.
  std::shared_ptr<const UpdateRule> rule;
  /// Per parameter, whether the rule updates it; other optimizers do the others. Empty: all.
  std::vector<bool> ruled;
  /// The NVMe tier takes the states of chunks that the host has no room for. nullopt: there is
  /// none.
  std::optional<NvmeOptions> nvme;
  /// Share of the state bytes that go there whether the host has room or not, in [0, 1].
  double nvme_fraction = 0.0;
};

}  // namespace castor
