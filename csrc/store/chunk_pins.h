#pragma once

#include <span>
#include <utility>
#include <vector>

#include "core/runtime.h"
#include "store/session_device.h"

namespace castor {

/// Pins of chunks that stay where they are on the device while an operator, or a kernel of castor's
/// own, has their addresses (docs/design/0021). Destroyed on the thread that made it; `runtime`
/// outlives it.
class ChunkPins {
 public:
  explicit ChunkPins(Runtime& runtime) : runtime_(&runtime) {}
  /// Pins those of `chunks` whose gradients are on the device, for the calling thread's stream.
  /// Pins none on a device that does not compute by itself: freed memory keeps its bytes there.
  ChunkPins(Runtime& runtime, const SessionDevice& device, std::span<const ChunkId> chunks)
      : ChunkPins(runtime) {
    for (const ChunkId chunk : chunks) {
      if (device.computes_by_itself()) {
        add(chunk, device.current_stream(), PayloadKind::kGrad);
      }
    }
  }
  ~ChunkPins() {
    if (!pins_.empty()) {
      runtime_->unpin(pins_);
    }
  }
  ChunkPins(ChunkPins&&) noexcept = default;
  ChunkPins& operator=(ChunkPins&&) = delete;

  /// Pins the chunk as Runtime::hold does. Returns false where there is nothing to pin.
  bool add(ChunkId chunk, StreamId stream, PayloadKind used) {
    auto pin = runtime_->pin_for_operator(chunk, stream, used);
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
