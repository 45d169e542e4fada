#include "store/stored_weights.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace castor {
namespace {

constexpr char kOnNvme[] =
    "these parameters or gradients are on NVMe (or were, until their model was dropped) and "
    "have no address. Operators bring them into memory: take a .clone() before numpy(), "
    "data_ptr() or torch.save. Savers of others take model.state_dict(), which makes addresses in "
    "files, and booster.save_model writes the model without any";
constexpr char kOnRanks[] =
    "these parameters are sharded over ranks (zero_stage=3; or were, until their model was "
    "dropped) and have no address. Operators gather them: take a .clone() before numpy(), "
    "data_ptr() or torch.save, or write the model with booster.save_model";
constexpr char kNotWritable[] =
    "weights that are sharded over ranks (zero_stage=3) change in optimizer.step() and in "
    "loads alone: what each rank writes between would come to the others at different times. Edit "
    "them before booster.boost, load them with booster.load or booster.load_model, or give "
    "zero_stage=1";

class Lease final : public ParamLease {
 public:
  Lease(ChunkStream::Pin pin, const SessionDevice& device, bool writable)
      : pin_(std::move(pin)), device_(device), writable_(writable) {}
  ~Lease() override {
    try {
      await_readers();
    } catch (...) {  // the device is lost, and its copies with it
    }
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  [[nodiscard]] std::byte* data() const noexcept override { return pin_.payloads().front().data(); }
  void wait(ParamAccess access) override {
    if (access == ParamAccess::kWrite && !writable_) {
      throw UsageError(kNotWritable);
    }
    pin_.wait(access == ParamAccess::kWrite ? StreamAccess::kEdit : StreamAccess::kRead);
    if (access == ParamAccess::kWrite) {
      await_readers();
    }
  }

 private:
  // Copies to the device may go on where the device alone has waited for them.
  void await_readers() { device_.host_writes(pin_.payloads().front()); }

  ChunkStream::Pin pin_;
  const SessionDevice& device_;
  const bool writable_;
};

}  // namespace

std::vector<std::vector<PayloadSpec>> StoredWeights::parts_of(const ChunkLayout& layout,
                                                              const std::vector<bool>& stored) {
  std::vector<std::vector<PayloadSpec>> parts(2 * stored.size());
  for (std::size_t i = 0; i < stored.size(); ++i) {
    if (!stored[i]) {
      continue;
    }
    const ChunkSpec& chunk = layout.chunks()[i];
    const std::string of_chunk = " of chunk " + std::to_string(i);
    parts[i].push_back({"parameters" + of_chunk, chunk.used_bytes});
    if (chunk.trainable) {
      parts[stored.size() + i].push_back({"gradients" + of_chunk, chunk.used_bytes});
    }
  }
  return parts;
}

ParamStoreSpec StoredWeights::on_nvme(std::vector<bool> stored, std::size_t num_slots) {
  return {
      .chunks = std::move(stored), .max_leases = max_leases_in(num_slots), .no_address = kOnNvme};
}

ParamStoreSpec StoredWeights::on_ranks(std::vector<bool> sharded, std::size_t max_leases) {
  return {.chunks = std::move(sharded),
          .gradients = false,
          .writable = false,
          .max_leases = max_leases,
          .no_address = kOnRanks};
}

StoredWeights::StoredWeights(ParamStoreSpec spec, const AddressFollower& params,
                             const AddressFollower& gradients, ChunkStream& stream,
                             const SessionDevice& device)
    : spec_(std::move(spec)),
      stored_(spec_.chunks),
      params_(params),
      gradients_(gradients),
      stream_(stream),
      device_(device),
      parts_(2 * stored_.size()) {}

void StoredWeights::bind(std::size_t part, std::byte* address) const noexcept {
  if (part < stored_.size()) {
    params_.point_at(ChunkId{static_cast<std::uint32_t>(part)}, address);
  } else {
    gradients_.point_at(ChunkId{static_cast<std::uint32_t>(part - stored_.size())}, address);
  }
}

std::unique_ptr<ParamLease> StoredWeights::lease(ChunkId chunk) {
  return std::make_unique<Lease>(stream_.pin(parameters_of(chunk)), device_, spec_.writable);
}

void StoredWeights::check_writable(ChunkId chunk) const {
  if (stored(chunk) && !spec_.writable) {
    throw UsageError(kNotWritable);
  }
}

void StoredWeights::announce(std::span<const ChunkId> chunks) {
  forget_announced();
  for (const ChunkId chunk : chunks.first(std::min(chunks.size(), max_leases()))) {
    stream_.prefetch(parameters_of(chunk));
  }
}

void StoredWeights::moved_out(ChunkId chunk) noexcept {
  const MutexLock lock(mutex_);
  parts_[parameters_of(chunk)].bound = false;
}

std::unique_ptr<StoredWeights::Visit> StoredWeights::visit(std::span<const WeightUse> uses) {
  std::vector<std::size_t> parts;
  for (const WeightUse& use : uses) {
    parts.push_back(use.part);
  }
  Pins pins = stream_.pin(parts);
  for (std::size_t i = 0; i < uses.size(); ++i) {
    pins[i].wait(uses[i].writes ? StreamAccess::kEdit : StreamAccess::kRead);
  }
  const MutexLock lock(mutex_);
  for (std::size_t i = 0; i < uses.size(); ++i) {
    Part& part = parts_[parts[i]];
    ++part.num_visits;
    part.bound = true;
    bind(parts[i], pins[i].payloads().front().data());
  }
  return std::make_unique<Visit>(*this, std::move(parts), std::move(pins));
}

// An operator has returned when a device has been given it, not when it is over.
void StoredWeights::await_operators() const noexcept {
  try {
    device_.await();
  } catch (...) {  // the device is lost, and says so to whoever uses it next
  }
}

void StoredWeights::unbind(std::span<const std::size_t> parts) noexcept {
  const MutexLock lock(mutex_);
  for (const std::size_t i : parts) {
    Part& part = parts_[i];
    if (--part.num_visits == 0 && std::exchange(part.bound, false)) {
      bind(i, nullptr);
    }
  }
}

StoredWeights::Pins StoredWeights::pin_for_update(ChunkId chunk) {
  const std::size_t parts[] = {parameters_of(chunk), gradients_of(chunk)};
  Pins pins = stream_.pin(parts);
  pins[0].wait(StreamAccess::kUpdate);
  device_.host_writes(pins[0].payloads().front());
  pins[1].wait(StreamAccess::kRead);
  return pins;
}

void StoredWeights::announce_updates(std::span<const ChunkId> chunks) {
  std::size_t room = max_leases();
  for (const ChunkId chunk : chunks) {
    if (room == 0) {
      return;
    }
    if (gradients_stored(chunk)) {  // updates of others take nothing through the window
      stream_.prefetch(parameters_of(chunk));
      stream_.prefetch(gradients_of(chunk));
      --room;
    }
  }
}

void StoredWeights::read_gradients(std::span<const ChunkId> chunks,
                                   const std::function<void(ChunkId, const std::byte*)>& use) {
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    for (std::size_t next = i + 1; next < std::min(i + 1 + max_leases(), chunks.size()); ++next) {
      stream_.prefetch(gradients_of(chunks[next]));
    }
    stream_.use(gradients_of(chunks[i]), StreamAccess::kRead,
                [&](auto payloads) { use(chunks[i], payloads.front().data()); });
  }
}

void StoredWeights::discard_gradients(ChunkId chunk) { stream_.discard(gradients_of(chunk)); }

void StoredWeights::discard_parameters() {
  if (torn()) {
    stream_.discard_all();
  }
  for (std::size_t part = 0; part < stored_.size(); ++part) {
    if (stored_[part]) {
      stream_.discard(part);
    }
  }
}

}  // namespace castor
