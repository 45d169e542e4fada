#include "store/session_ranks.h"

#include <algorithm>
#include <utility>

namespace castor {

DeviceStaging make_staging(ChunkManager& chunks, PayloadKind kind,
                           std::shared_ptr<CopyEngine> copies, const SessionDevice& device) {
  if (!device.computes_by_itself()) {
    return {};
  }
  std::size_t largest = 0;
  for (std::size_t i = 0; i < chunks.layout().chunks().size(); ++i) {
    const auto& payload = chunks.payload(ChunkId{static_cast<std::uint32_t>(i)}, kind);
    if (payload && payload->tier() == TierKind::kDevice) {
      largest = std::max(largest, payload->bytes());
    }
  }
  Block block;
  if (largest > 0) {
    block = chunks.host().allocate(
        largest, "what lives on the device passes through it from rank to rank; raise host_memory");
  }
  return {std::move(copies), chunks.device(), std::move(block)};
}

}  // namespace castor
