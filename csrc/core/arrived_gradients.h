#pragma once

#include <cstdint>
#include <vector>

#include "core/chunk_layout.h"

namespace castor {

/// Which parameters have a gradient, and with which of them a chunk has all of its gradients.
/// Whoever follows a step asks here: the runtime, and the recorder of `castor estimate`. Not
/// thread-safe.
class ArrivedGradients {
 public:
  explicit ArrivedGradients(const ChunkLayout& layout)
      : layout_(layout), arrived_(layout.params().size(), false) {
    for (const ChunkSpec& chunk : layout.chunks()) {
      missing_.push_back(static_cast<std::uint32_t>(chunk.params.size()));
    }
  }

  /// A gradient of the parameter has come; further ones before its chunk has all are parts of it,
  /// as reentrant checkpoints deliver them. Returns whether the chunk has all with this one: what
  /// comes next is another pass's.
  [[nodiscard]] bool add(ParamId param) {
    if (arrived_[index(param)]) {
      return false;
    }
    arrived_[index(param)] = true;
    const ChunkId chunk = layout_.place(param).chunk;
    if (--missing_[index(chunk)] > 0) {
      return false;
    }
    forget(chunk);
    return true;
  }

  /// The step is over, and parameters may have got no gradient.
  void forget(ChunkId chunk) {
    const auto& params = layout_.chunk(chunk).params;
    missing_[index(chunk)] = static_cast<std::uint32_t>(params.size());
    for (const ParamId param : params) {
      arrived_[index(param)] = false;
    }
  }

 private:
  const ChunkLayout& layout_;
  std::vector<bool> arrived_;           // per parameter
  std::vector<std::uint32_t> missing_;  // per chunk
};

}  // namespace castor
