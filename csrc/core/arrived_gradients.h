#pragma once

#include <cstdint>
#include <vector>

#include "core/chunk_layout.h"

namespace castor {

/// Account of the parameters that have a gradient, which tells when a chunk has all of its
/// gradients. The runtime uses one, and so does the recorder of `castor estimate`. Not thread-safe.
class ArrivedGradients {
 public:
  explicit ArrivedGradients(const ChunkLayout& layout)
      : layout_(layout), arrived_(layout.params().size(), false) {
    for (const ChunkSpec& chunk : layout.chunks()) {
      missing_.push_back(static_cast<std::uint32_t>(chunk.params.size()));
    }
  }

  /// Notes that a gradient of the parameter has come, and returns whether its chunk has all of its
  /// gradients with this one. Further gradients of the parameter before the chunk has all are parts
  /// of the same gradient, as reentrant checkpoints deliver them. Gradients that come after that
  /// belong to another pass.
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

  /// Forgets the chunk's gradients when the step is over: some of its parameters may have got none.
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
