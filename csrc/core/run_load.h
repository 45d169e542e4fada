#pragma once

#include <cstdint>

namespace castor {

/// How many of a model's weights a checkpoint replaces.
enum class LoadedWeights : std::uint8_t {
  kNone,
  kSome,
  kAll,  ///< those on NVMe need not be read then
};

/// What a checkpoint replaces of a run.
struct RunLoad {
  LoadedWeights weights = LoadedWeights::kNone;
  bool states = false;  ///< of the optimizer
};

}  // namespace castor
