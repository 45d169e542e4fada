#pragma once

#include <cstdint>

#include "core/ids.h"

namespace castor {

class ChunkManager;

/// Who keeps a chunk on the device: a module, or an operator that took the addresses of its memory.
enum class PinKind : std::uint8_t { kModule, kOperator };

/// Keeps a chunk on the device while it lives, and for an operator all its payloads where they are.
/// Move-only; made by ChunkManager::pin and hold.
class Pin {
 public:
  Pin() = default;
  Pin(Pin&& other) noexcept;
  Pin& operator=(Pin&& other) noexcept;
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  ~Pin() { release(); }
  void release() noexcept;

 private:
  friend class ChunkManager;
  Pin(ChunkManager& manager, ChunkId chunk, PinKind kind) noexcept
      : manager_(&manager), chunk_(chunk), kind_(kind) {}
  ChunkManager* manager_ = nullptr;
  ChunkId chunk_{};
  PinKind kind_ = PinKind::kModule;
};

}  // namespace castor
