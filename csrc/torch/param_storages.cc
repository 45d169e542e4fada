#include "torch/param_storages.h"

#include <utility>

#include "torch/chunk_storages.h"

namespace castor {

ParamStorages::ParamStorages(const ChunkLayout& layout, const std::vector<bool>& chunks,
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

c10::Storage ParamStorages::replace(ParamId param, c10::Storage storage) {
  const MutexLock lock(mutex_);
  c10::Storage& own = storages_[index(param)];
  copy_pointer(own, storage);
  std::swap(own, storage);
  return storage;
}

c10::Storage ParamStorages::renew(ParamId param) {
  const c10::Storage& own = storage(param);
  return replace(param, empty_storage(own.nbytes(), own.device()));
}

void ParamStorages::point_at(ChunkId chunk, std::byte* address) const noexcept {
  const MutexLock lock(mutex_);
  for (const ParamId param : layout_.chunk(chunk).params) {
    if (storage(param)) {
      point(storage(param), address == nullptr ? nullptr : address + byte_offset(param));
    }
  }
}

void ParamStorages::for_each(ChunkId chunk,
                             const std::function<void(const c10::Storage&)>& use) const {
  for (const ParamId param : layout_.chunk(chunk).params) {
    if (storage(param)) {
      use(storage(param));
    }
  }
}

}  // namespace castor
