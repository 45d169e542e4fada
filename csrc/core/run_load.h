#pragma once

#include <cstdint>

namespace castor {

/// Extent to which a checkpoint replaces a model's weights.
enum class LoadedWeights : std::uint8_t {
  kNone,
  kSome,
  kAll,  ///< weights on NVMe need not be read then
};

/// Parts of a run that a checkpoint replaces.
struct RunLoad {
  LoadedWeights weights = LoadedWeights::kNone;
  bool states = false;  ///< whether the optimizer's states are replaced
};

}  // namespace castor
