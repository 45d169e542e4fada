#include "store/activation_store.h"

#include <utility>

#include "core/error.h"

namespace castor {

/// Memory that passes hand back and forth. At any time it is on the device, on the host or NVMe, or
/// both.
class ActivationStore::Kept {
 public:
  Kept(std::unique_ptr<Original> memory, std::shared_ptr<ActivationStore> store)
      : owner(std::move(store)),
        original(std::move(memory)),
        device(original->lock()),
        bytes(device->bytes()) {}
  ~Kept() { owner->forget(*this); }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  [[nodiscard]] bool has_left() const { return host.data() != nullptr || !pages.empty(); }

  const std::shared_ptr<ActivationStore> owner;
  // Whoever else holds it keeps it, and it need not come back.
  const std::unique_ptr<Original> original;
  std::shared_ptr<DeviceMemory> device;  // nullptr: not there
  const std::size_t bytes;
  Block host;                    // on the host
  ActivationPages::Pages pages;  // or on NVMe; neither: it never left
  CopyTicket out = CopyTicket::kNone;
  CopyTicket in = CopyTicket::kNone;
};

ActivationStore::ActivationStore(Parts parts)
    : parts_(std::move(parts)),
      host_blocks_(parts_.memory.host_tier(),
                   "activations=\"offload\" keeps activations in host memory; raise host_memory, "
                   "offload fewer blocks, or give nvme_path and an nvme_memory with room for what "
                   "does not fit",
                   HostBlocks::Account::kHost) {
  if (ChunkStream* const stream = parts_.memory.stream_of(StoragePlan::kActivations)) {
    pages_.emplace(*stream, parts_.memory.num_activation_pages());
  }
}

template <typename Function>
void ActivationStore::for_each(const Pass& pass, Function&& function) {
  for (const auto& entry : pass.kept_) {
    if (const auto alive = entry.lock()) {
      function(*alive);
    }
  }
}

std::shared_ptr<ActivationStore::Pass> ActivationStore::begin() {
  const bool beside = parts_.copies.asynchronous();
  Dropped dropped;
  const MutexLock lock(mutex_);
  if (const auto leaving = leaving_.lock()) {
    let_go(*leaving, dropped);
  }
  const auto last = latest_.lock();
  if (last) {
    send(*last);
    if (!beside) {
      let_go(*last, dropped);
    }
  }
  leaving_ = last;
  auto pass = std::make_shared<Pass>();
  pass->previous_ = last;
  latest_ = pass;
  return pass;
}

std::shared_ptr<ActivationStore::Kept> ActivationStore::keep(
    Pass& pass, const void* identity, const std::function<std::unique_ptr<Original>()>& original) {
  const MutexLock lock(mutex_);
  std::weak_ptr<Kept>& known = pass.by_identity_[identity];
  std::shared_ptr<Kept> kept = known.lock();
  if (!kept) {
    kept = std::make_shared<Kept>(original(), shared_from_this());
    known = kept;
    pass.kept_.push_back(known);
  }
  return kept;
}

std::shared_ptr<DeviceMemory> ActivationStore::restore(const std::shared_ptr<Pass>& pass,
                                                       Kept& kept) {
  const bool beside = parts_.copies.asynchronous();
  Dropped dropped;
  const MutexLock lock(mutex_);
  const auto before = in_backward_.lock();
  in_backward_ = pass;
  if (before != pass) {
    if (before) {
      let_go(*before, dropped);  // its graph was retained
    }
    if (beside) {
      for_each(*pass, [this](Kept& one) { fetch(one); });
    }
  }
  fetch(kept);
  parts_.copies.order(kept.in, parts_.memory.device().current_stream());
  std::shared_ptr<DeviceMemory> restored = kept.device;
  if (before != pass) {
    announce_next(*pass);
    if (beside) {
      fetch_ahead(*pass);
    }
  }
  return restored;
}

void ActivationStore::send(Pass& pass) {
  pass.by_identity_.clear();  // what is saved from now on may have been written since
  for_each(pass, [this](Kept& kept) {
    if (kept.has_left()) {
      return;
    }
    try {
      kept.host = host_blocks_.take(kept.bytes);
    } catch (const OutOfMemory& error) {
      if (error.tier() != TierKind::kHost || !pages_) {
        throw;
      }
      write(kept);
      return;
    }
    kept.out = copy_out(kept, 0, {kept.host.data(), kept.bytes});
    bytes_offloaded_ += kept.bytes;
  });
}

void ActivationStore::let_go(Pass& pass, Dropped& dropped) {
  for_each(pass, [&](Kept& kept) {
    if (kept.has_left() && kept.device) {
      parts_.copies.wait(kept.out);
      parts_.copies.wait(kept.in);
      dropped.push_back(std::exchange(kept.device, {}));
    }
  });
}

void ActivationStore::fetch(Kept& kept) {
  if (kept.device) {
    return;
  }
  kept.device = kept.original->lock();
  if (kept.device) {
    return;
  }
  std::shared_ptr<DeviceMemory> memory = parts_.take(kept.bytes);
  if (!kept.pages.empty()) {
    read(kept, *memory);
  } else {
    kept.in = copy_in({kept.host.data(), kept.bytes}, *memory, 0);
  }
  kept.device = std::move(memory);
}

CopyTicket ActivationStore::copy_out(const Kept& kept, std::size_t offset,
                                     std::span<std::byte> target) {
  return parts_.copies.submit({.source = {kept.device->data() + offset, target.size()},
                               .target = target,
                               .direction = CopyDirection::kDeviceToHost,
                               .behind = parts_.memory.device_tier()->stream(),
                               .await_source = {}});
}

CopyTicket ActivationStore::copy_in(std::span<const std::byte> source, const DeviceMemory& target,
                                    std::size_t offset) {
  return parts_.copies.submit({.source = source,
                               .target = {target.data() + offset, source.size()},
                               .direction = CopyDirection::kHostToDevice,
                               .behind = parts_.memory.device().current_stream(),
                               .await_source = {}});
}

// Backward asks first for what was saved last.
void ActivationStore::announce_next(const Pass& pass) {
  const auto next = pass.previous_.lock();
  if (!next || !pages_) {
    return;
  }
  pages_->forget_announced();
  for (auto entry = next->kept_.rbegin(); entry != next->kept_.rend(); ++entry) {
    const auto kept = entry->lock();
    if (kept && !kept->device && kept->original->expired()) {
      pages_->announce(kept->pages);
    }
  }
}

// What lies on NVMe comes through a window that has no room for all of a block. Where there is no
// room, backward of that block brings in what it needs.
void ActivationStore::fetch_ahead(Pass& pass) {
  const auto next = pass.previous_.lock();
  if (!next) {
    return;
  }
  try {
    for_each(*next, [this](Kept& kept) {
      if (!kept.device && kept.pages.empty()) {
        parts_.memory.nonmodel()->make_room(kept.bytes);
        fetch(kept);
      }
    });
  } catch (const OutOfMemory& error) {
    if (error.tier() != TierKind::kDevice) {
      throw;
    }
  }
}

// The copy off the device is waited for, the one to NVMe is not.
void ActivationStore::write(Kept& kept) {
  auto pages = pages_->try_take(kept.bytes);
  if (!pages) {
    throw OutOfMemory(
        TierKind::kNvme, kept.bytes, pages_->free_bytes(),
        parts_.memory.num_activation_pages() * ActivationPages::kPageBytes,
        "activations=\"offload\" keeps there what host_memory has no room for, in what "
        "nvme_memory has left; raise either, or offload fewer blocks");
  }
  const auto fill = [&](std::size_t offset, std::span<std::byte> page) {
    parts_.copies.wait(copy_out(kept, offset, page));
  };
  try {
    pages_->write(*pages, kept.bytes, fill);
  } catch (...) {
    pages_->give_back(*pages);
    throw;
  }
  kept.pages = std::move(*pages);
  bytes_offloaded_ += kept.bytes;
}

void ActivationStore::read(Kept& kept, const DeviceMemory& target) {
  pages_->read(kept.pages, kept.bytes, [&](std::size_t offset, std::span<std::byte> page) {
    parts_.copies.wait(copy_in(page, target, offset));
  });
}

// Called wherever autograd drops a graph, by threads that hold Python's global lock too.
void ActivationStore::forget(Kept& kept) noexcept {
  for (const CopyTicket ticket : {kept.out, kept.in}) {
    try {
      parts_.copies.wait(ticket);
    } catch (...) {  // nobody needs the bytes any more
    }
  }
  if (kept.host.data() != nullptr) {
    host_blocks_.give_back(std::move(kept.host));
  }
  if (!kept.pages.empty()) {
    pages_->give_back(kept.pages);
  }
}

ActivationStore::Figures ActivationStore::figures() const {
  Figures figures{.bytes_offloaded = bytes_offloaded_};
  figures.ready_host_bytes = host_blocks_.kept_bytes();
  figures.ready_nvme_bytes = pages_ ? pages_->free_bytes() : 0;
  return figures;
}

}  // namespace castor
