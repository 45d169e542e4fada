#include "store/expert_model.h"

#include <algorithm>

namespace castor {

std::size_t ExpertLayer::expert_bytes() const {
  std::size_t bytes = 0;
  for (const std::size_t row : row_bytes) {
    bytes += row;
  }
  return bytes;
}

std::vector<ChunkId> ExpertLayer::chunks(const ChunkLayout& layout) const {
  std::vector<ChunkId> chunks;
  for (const ParamId param : params) {
    const ChunkId chunk = layout.place(param).chunk;
    if (std::ranges::find(chunks, chunk) == chunks.end()) {
      chunks.push_back(chunk);
    }
  }
  return chunks;
}

}  // namespace castor
