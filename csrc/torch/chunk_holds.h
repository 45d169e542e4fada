#pragma once

#include <span>
#include <utility>
#include <vector>

#include "core/runtime.h"
#include "torch/session_device.h"

namespace castor {

/// Chunks that stay where they are on the device while an operator, or a kernel of castor's own,
/// has their addresses (docs/design/0021). Goes on the thread that made it; `runtime` outlives it.
class ChunkHolds {
 public:
  explicit ChunkHolds(Runtime& runtime) : runtime_(&runtime) {}
  /// Of `chunks` those that live on the device, for the calling thread's stream. None where that
  /// does not compute by itself: freed memory keeps its bytes there.
  ChunkHolds(Runtime& runtime, const SessionDevice& device, std::span<const ChunkId> chunks)
      : ChunkHolds(runtime) {
    for (const ChunkId chunk : chunks) {
      if (device.computes_by_itself()) {
        add(chunk, device.current_stream(), PayloadKind::kGrad);
      }
    }
  }
  ~ChunkHolds() {
    if (!pins_.empty()) {
      runtime_->unpin(pins_);
    }
  }
  ChunkHolds(ChunkHolds&&) noexcept = default;
  ChunkHolds& operator=(ChunkHolds&&) = delete;

  /// As Runtime::hold. False where it holds nothing.
  bool add(ChunkId chunk, StreamId stream, PayloadKind used) {
    auto pin = runtime_->hold(chunk, stream, used);
    if (pin) {
      pins_.push_back(std::move(*pin));
    }
    return pin.has_value();
  }

 private:
  Runtime* runtime_;
  std::vector<Pin> pins_;
};

}  // namespace castor
