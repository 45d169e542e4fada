#include "torch/gradient_storages.h"

#include <utility>

#include "torch/chunk_storages.h"

namespace castor {

GradientStorages::GradientStorages(const ChunkLayout& layout, const std::vector<bool>& chunks,
                                   c10::Device device)
    : layout_(layout), storages_(layout.params().size()) {
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    if (chunks[index(layout.place(param).chunk)]) {
      storages_[i] =
          empty_storage(layout.param(param).numel * size_of(layout.param(param).type), device);
    }
  }
}

c10::Storage GradientStorages::renew(ParamId param) {
  const MutexLock lock(mutex_);
  c10::Storage& own = storages_[index(param)];
  c10::Storage fresh = twin_of(own);
  std::swap(own, fresh);
  return fresh;
}

void GradientStorages::point_at(ChunkId chunk, std::byte* address) const noexcept {
  const MutexLock lock(mutex_);
  for (const ParamId param : layout_.chunk(chunk).params) {
    if (storage(param)) {
      const std::size_t offset = layout_.place(param).offset * size_of(layout_.param(param).type);
      point(storage(param), address == nullptr ? nullptr : address + offset);
    }
  }
}

void GradientStorages::for_each(ChunkId chunk,
                                const std::function<void(const c10::Storage&)>& use) const {
  for (const ParamId param : layout_.chunk(chunk).params) {
    if (storage(param)) {
      use(storage(param));
    }
  }
}

}  // namespace castor
