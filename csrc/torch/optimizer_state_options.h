#pragma once

#include <optional>

#include "io/nvme_tier.h"
#include "optim/state_format.h"

namespace castor {

class DeviceBackend;

struct OptimizerStateOptions {
  /// Other formats than kFp32 are for bf16 parameters.
  StateFormat format = StateFormat::kFp32;
  /// Whether Adam's moments get payloads; false when another optimizer updates the parameters.
  bool moments = true;
  /// The NVMe tier takes the states of chunks that the host has no room for. nullopt: there is
  /// none.
  std::optional<NvmeOptions> nvme;
  /// Share of the state bytes that go there whether the host has room or not, in [0, 1].
  double nvme_fraction = 0.0;
  /// The device whose memory the host does not address; nullptr: there is none. Borrowed.
  DeviceBackend* device = nullptr;
};

}  // namespace castor
