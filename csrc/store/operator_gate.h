#pragma once

#include <cstddef>

#include "core/chunk_layout.h"

namespace castor {

/// Use of a group of the gate by an operator.
struct OperatorUse {
  std::size_t group = 0;
  bool writes = false;
};

/// Seam of the gate that holds torch's operators back from memory that something else still uses
/// (TensorGate in csrc/torch). Memory is in groups: group i is the parameters and optimizer states
/// of chunk i, gradient_group() its gradients. Thread-safe.
class OperatorGate {
 public:
  virtual ~OperatorGate() = default;
  /// Holds operators back from the group until its memory may be used.
  virtual void close(std::size_t group) = 0;
  /// Opens the group. No effect on an open group.
  virtual void open(std::size_t group) = 0;
  /// Waits for a closed group and opens it. Rethrows what the wait throws; the group stays closed
  /// then.
  virtual void pass(std::size_t group) = 0;
  /// Same as pass(group), for every group. Costs next to nothing while all are open.
  virtual void pass_all() = 0;
};

/// Returns the gate's group of a chunk's gradients.
[[nodiscard]] inline std::size_t gradient_group(const ChunkLayout& layout, ChunkId chunk) noexcept {
  return layout.chunks().size() + index(chunk);
}

}  // namespace castor
