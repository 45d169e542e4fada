#include "torch/activation_offload.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "torch/chunk_storages.h"

namespace castor {
namespace {

/// A smaller storage stays: a copy would cost more than its bytes are worth.
constexpr std::size_t kSmallest = std::size_t{4} << 10;

/// Whether the tensor is plain memory of `device` that its storage owns. A parameter's storage
/// borrows its bytes from a chunk.
bool can_leave(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.device() != device ||
      !tensor.has_storage() || tensor.is_nested() || tensor.is_conj() || tensor.is_neg() ||
      tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
      (tensor.is_leaf() && tensor.requires_grad())) {
    return false;
  }
  const c10::Storage& storage = tensor.storage();
  return storage.nbytes() >= kSmallest && storage.data_ptr().get_context() != nullptr;
}

std::span<std::byte> bytes_of(const c10::Storage& storage) {
  return {static_cast<std::byte*>(storage.mutable_data()), storage.nbytes()};
}

}  // namespace

/// A storage that passes hands back and forth. At any time it is on the device, at home or both.
struct ActivationOffload::Moved {
  explicit Moved(const c10::Storage& storage, std::shared_ptr<ActivationOffload> offload)
      : owner(std::move(offload)),
        bytes(storage.nbytes()),
        device(storage),
        original(storage.getWeakStorageImpl()) {}
  ~Moved() { owner->forget(*this); }
  Moved(const Moved&) = delete;
  Moved& operator=(const Moved&) = delete;

  [[nodiscard]] bool has_left() const { return host.data() != nullptr || !pages.empty(); }

  const std::shared_ptr<ActivationOffload> owner;
  const std::size_t bytes;
  c10::Storage device;  // null: not there
  // Whoever else holds it keeps it, and it need not come back.
  const c10::weak_intrusive_ptr<c10::StorageImpl> original;
  Block host;                    // on the host
  ActivationPages::Pages pages;  // or on NVMe; neither: it never left
  CopyTicket out = CopyTicket::kNone;
  CopyTicket in = CopyTicket::kNone;
};

ActivationOffload::ActivationOffload(std::shared_ptr<Session> session)
    : session_(std::move(session)),
      host_blocks_(session_->memory().host_tier(),
                   "activations=\"offload\" keeps activations in host memory; raise host_memory, "
                   "offload fewer blocks, or give nvme_path and an nvme_memory with room for what "
                   "does not fit",
                   HostBlocks::Account::kHost) {
  if (ChunkStream* const stream = session_->memory().stream_of(StoragePlan::kActivations)) {
    pages_.emplace(*stream, session_->memory().num_activation_pages());
  }
}

template <typename Function>
void ActivationOffload::for_each(const Pass& pass, Function&& function) {
  for (const auto& entry : pass.moved_) {
    if (const auto alive = entry.lock()) {
      function(*alive);
    }
  }
}

std::shared_ptr<ActivationOffload::Pass> ActivationOffload::begin() {
  const bool beside = session_->chunks().copies().asynchronous();
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

std::shared_ptr<ActivationOffload::Saved> ActivationOffload::save(const std::shared_ptr<Pass>& pass,
                                                                  const at::Tensor& tensor) {
  auto saved = std::make_shared<Saved>();
  saved->pass_ = pass;
  saved->counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  saved->version_ = saved->counter_.enabled() ? saved->counter_.current_version() : 0;
  if (!can_leave(tensor, session_->torch_device())) {
    // What a node has computed comes with the node as its origin, which would keep itself alive
    // where backward never runs.
    saved->kept_ = tensor.detach();
    return saved;
  }
  saved->type_ = tensor.scalar_type();
  saved->offset_ = static_cast<std::size_t>(tensor.storage_offset());
  saved->geometry_ = {at::DimVector(tensor.sizes()), at::DimVector(tensor.strides())};
  const MutexLock lock(mutex_);
  std::weak_ptr<Moved>& known = pass->by_storage_[tensor.storage().unsafeGetStorageImpl()];
  saved->moved_ = known.lock();
  if (!saved->moved_) {
    saved->moved_ = std::make_shared<Moved>(tensor.storage(), shared_from_this());
    known = saved->moved_;
    pass->moved_.push_back(known);
  }
  return saved;
}

at::Tensor ActivationOffload::restore(const Saved& saved) {
  if (saved.counter_.enabled() && saved.counter_.current_version() != saved.version_) {
    throw UsageError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation: a tensor that a block with activations=\"offload\" saved is at version " +
        std::to_string(saved.counter_.current_version()) + "; expected version " +
        std::to_string(saved.version_) + " instead");
  }
  if (!saved.moved_) {
    return saved.kept_;
  }
  const at::NoGradGuard no_graph;
  const bool beside = session_->chunks().copies().asynchronous();
  Dropped dropped;
  const MutexLock lock(mutex_);
  const auto before = in_backward_.lock();
  in_backward_ = saved.pass_;
  if (before != saved.pass_) {
    if (before) {
      let_go(*before, dropped);  // its graph was retained
    }
    if (beside) {
      for_each(*saved.pass_, [this](Moved& moved) { fetch(moved); });
    }
  }
  fetch(*saved.moved_);
  session_->chunks().copies().order(saved.moved_->in, session_->memory().device().current_stream());
  const at::Tensor restored =
      tensor_over(saved.moved_->device, saved.type_, saved.offset_, saved.geometry_);
  if (before != saved.pass_) {
    announce_next(*saved.pass_);
    if (beside) {
      fetch_ahead(*saved.pass_);
    }
  }
  return restored;
}

void ActivationOffload::send(Pass& pass) {
  pass.by_storage_.clear();  // what is saved from now on may have been written since
  for_each(pass, [this](Moved& moved) {
    if (moved.has_left()) {
      return;
    }
    try {
      moved.host = host_blocks_.take(moved.bytes);
    } catch (const OutOfMemory& error) {
      if (error.tier() != TierKind::kHost || !pages_) {
        throw;
      }
      write(moved);
      return;
    }
    moved.out =
        session_->chunks().copies().submit({.source = bytes_of(moved.device),
                                            .target = {moved.host.data(), moved.bytes},
                                            .direction = CopyDirection::kDeviceToHost,
                                            .behind = session_->memory().device_tier()->stream(),
                                            .await_source = {}});
    bytes_offloaded_ += moved.bytes;
  });
}

void ActivationOffload::let_go(Pass& pass, Dropped& dropped) {
  for_each(pass, [&](Moved& moved) {
    if (moved.has_left() && moved.device) {
      session_->chunks().copies().wait(moved.out);
      session_->chunks().copies().wait(moved.in);
      dropped.push_back(std::exchange(moved.device, {}));
    }
  });
}

void ActivationOffload::fetch(Moved& moved) {
  if (moved.device) {
    return;
  }
  if (auto alive = moved.original.lock()) {
    moved.device = c10::Storage(std::move(alive));
    return;
  }
  const auto options = at::TensorOptions().dtype(at::kByte).device(session_->torch_device());
  const c10::Storage storage =
      at::empty({static_cast<std::int64_t>(moved.bytes)}, options).storage();
  if (!moved.pages.empty()) {
    read(moved, storage);
    moved.device = storage;
    return;
  }
  moved.in =
      session_->chunks().copies().submit({.source = {moved.host.data(), moved.bytes},
                                          .target = bytes_of(storage),
                                          .direction = CopyDirection::kHostToDevice,
                                          .behind = session_->memory().device().current_stream(),
                                          .await_source = {}});
  moved.device = storage;
}

// Backward asks first for what was saved last.
void ActivationOffload::announce_next(const Pass& pass) {
  const auto next = pass.previous_.lock();
  if (!next || !pages_) {
    return;
  }
  pages_->forget_announced();
  for (auto entry = next->moved_.rbegin(); entry != next->moved_.rend(); ++entry) {
    const auto moved = entry->lock();
    if (moved && !moved->device && moved->original.expired()) {
      pages_->announce(moved->pages);
    }
  }
}

// What lies on NVMe comes through a window that has no room for all of a block. Where there is no
// room, backward of that block brings in what it needs.
void ActivationOffload::fetch_ahead(Pass& pass) {
  const auto next = pass.previous_.lock();
  if (!next) {
    return;
  }
  try {
    for_each(*next, [this](Moved& moved) {
      if (!moved.device && moved.pages.empty()) {
        session_->memory().nonmodel()->make_room(moved.bytes);
        fetch(moved);
      }
    });
  } catch (const OutOfMemory& error) {
    if (error.tier() != TierKind::kDevice) {
      throw;
    }
  }
}

// The copy off the device is waited for, the one to NVMe is not.
void ActivationOffload::write(Moved& moved) {
  auto pages = pages_->try_take(moved.bytes);
  if (!pages) {
    throw OutOfMemory(
        TierKind::kNvme, moved.bytes, pages_->free_bytes(),
        session_->memory().num_activation_pages() * ActivationPages::kPageBytes,
        "activations=\"offload\" keeps there what host_memory has no room for, in what "
        "nvme_memory has left; raise either, or offload fewer blocks");
  }
  const auto fill = [&](std::size_t offset, std::span<std::byte> page) {
    session_->chunks().copies().wait(session_->chunks().copies().submit(
        {.source = bytes_of(moved.device).subspan(offset, page.size()),
         .target = page,
         .direction = CopyDirection::kDeviceToHost,
         .behind = session_->memory().device_tier()->stream(),
         .await_source = {}}));
  };
  try {
    pages_->write(*pages, moved.bytes, fill);
  } catch (...) {
    pages_->give_back(*pages);
    throw;
  }
  moved.pages = std::move(*pages);
  bytes_offloaded_ += moved.bytes;
}

void ActivationOffload::read(Moved& moved, const c10::Storage& storage) {
  const auto take = [&](std::size_t offset, std::span<std::byte> page) {
    session_->chunks().copies().wait(session_->chunks().copies().submit(
        {.source = page,
         .target = bytes_of(storage).subspan(offset, page.size()),
         .direction = CopyDirection::kHostToDevice,
         .behind = session_->memory().device().current_stream(),
         .await_source = {}}));
  };
  pages_->read(moved.pages, moved.bytes, take);
}

// Called wherever autograd drops a graph, by threads that hold Python's global lock too.
void ActivationOffload::forget(Moved& moved) noexcept {
  for (const CopyTicket ticket : {moved.out, moved.in}) {
    try {
      session_->chunks().copies().wait(ticket);
    } catch (...) {  // nobody needs the bytes any more
    }
  }
  if (moved.host.data() != nullptr) {
    host_blocks_.give_back(std::move(moved.host));
  }
  if (!moved.pages.empty()) {
    pages_->give_back(moved.pages);
  }
}

ActivationOffload::Figures ActivationOffload::figures() const {
  Figures figures{.bytes_offloaded = bytes_offloaded_};
  figures.ready_host_bytes = host_blocks_.kept_bytes();
  figures.ready_nvme_bytes = pages_ ? pages_->free_bytes() : 0;
  return figures;
}

}  // namespace castor
