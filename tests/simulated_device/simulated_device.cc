#include "simulated_device.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/host_kernels.h"
#include "host/mmap_arena.h"
#include "torch_allocations.h"

namespace castor::testing {
namespace {

class DeviceArena final : public Arena {
 public:
  explicit DeviceArena(std::shared_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}

  [[nodiscard]] std::byte* allocate(std::size_t bytes) override {
    if (memory_->refuses_now()) {
      throw OutOfMemory(TierKind::kDevice, bytes, 0, 0, "the simulated device refuses");
    }
    std::byte* const data = pages_.allocate(bytes);
    memory_->add(data, bytes);
    return data;
  }
  void deallocate(std::byte* data, std::size_t bytes) noexcept override {
    memory_->remove(data);
    std::memset(data, 0xff, bytes);
    pages_.deallocate(data, bytes);
  }
  [[nodiscard]] std::string description() const override { return "simulated device memory"; }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  MmapArena pages_;
};

class Fence final : public ComputeFence {
 public:
  Fence(SimulatedCopies& copies, std::vector<CopyTicket> waited)
      : copies_(copies), waited_(std::move(waited)) {}
  void wait() override { copies_.known_done(waited_); }

 private:
  SimulatedCopies& copies_;
  const std::vector<CopyTicket> waited_;
};

/// A lane on the one stream, the calling thread.
class Lane final : public DeviceLane {
 public:
  explicit Lane(std::uint64_t bytes_per_second)
      : copies_({.bytes_per_second = bytes_per_second, .copy = {}}) {}
  [[nodiscard]] StreamId stream() const noexcept override { return {}; }
  [[nodiscard]] CopyEngine& copies() noexcept override { return copies_; }

 private:
  AsyncCopyEngine copies_;
};

}  // namespace

void DeviceMemory::add(const std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  blocks_.emplace(data, bytes);
}

void DeviceMemory::remove(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  blocks_.erase(data);
}

bool DeviceMemory::contains(const void* data, std::size_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  auto block = blocks_.upper_bound(begin);
  if (block == blocks_.begin()) {
    return false;
  }
  --block;
  return begin + bytes <= block->first + block->second;
}

bool DeviceMemory::refuses_now() {
  std::size_t left = until_refusal_.load();
  return left > 0 && until_refusal_.compare_exchange_strong(left, left - 1) && left == 1;
}

SimulatedDevice::SimulatedDevice(std::uint64_t bytes_per_second)
    : bytes_per_second_(bytes_per_second), memory_(std::make_shared<DeviceMemory>()) {}

std::unique_ptr<CopyEngine> SimulatedDevice::make_copy_engine() {
  auto copies = std::make_unique<SimulatedCopies>(bytes_per_second_);
  copies_ = copies.get();
  return copies;
}

std::unique_ptr<DeviceLane> SimulatedDevice::make_lane() {
  return std::make_unique<Lane>(bytes_per_second_);
}

std::unique_ptr<Arena> SimulatedDevice::make_device_arena() {
  return std::make_unique<DeviceArena>(memory_);
}

std::unique_ptr<Arena> SimulatedDevice::make_host_arena() { return std::make_unique<MmapArena>(); }

void SimulatedDevice::follow(const std::shared_ptr<DeviceAccount>& account) {
  follow_torch_allocations(account);
}

void SimulatedDevice::check(const void* data, std::size_t bytes, std::string_view what) const {
  if (data != nullptr && bytes > 0 && !memory_->contains(data, bytes)) {
    throw Error("a kernel of the simulated device was given " + std::string(what) +
                " that is not in its memory");
  }
}

bool SimulatedDevice::has(std::string_view rule) const noexcept {
  return kernels_on_host(rule) != nullptr;
}

void SimulatedDevice::update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
                             StreamId /*stream*/) {
  counts_.update_calls.fetch_add(1);
  for (const UpdateSegment& segment : segments) {
    const std::size_t bytes = segment.numel * size_of(segment.type);
    check(segment.grad, bytes, "a gradient");
    check(segment.param, bytes, "a parameter");
    check(segment.master, segment.numel * sizeof(float), "a master");
    check(segment.remainder, segment.numel * sizeof(std::int16_t), "a remainder");
    for (std::size_t i = 0; i < rule.states().size(); ++i)
      check(segment.states[i], rule.states()[i].bytes(segment.numel), rule.states()[i].plural);
    counts_.update_numel.fetch_add(segment.numel);
  }
  kernels_on_host(rule.name())->update(rule, segments);
}

void SimulatedDevice::square_norms(std::span<const NormSegment> segments, std::span<double> sums,
                                   StreamId /*stream*/) {
  for (const NormSegment& segment : segments) {
    check(segment.data, segment.numel * size_of(segment.type), "a gradient");
    counts_.norm_numel.fetch_add(segment.numel);
  }
  square_norms_on_host(segments, sums);
}

void SimulatedDevice::average(void* mean, const void* parts, std::size_t count, std::size_t numel,
                              ScalarType type, StreamId /*stream*/) {
  check(mean, numel * size_of(type), "a mean");
  check(parts, count * numel * size_of(type), "gradients");
  average_on_host(mean, parts, count, numel, type);
}

std::unique_ptr<ComputeFence> SimulatedDevice::fence(StreamId /*stream*/) {
  counts_.fences.fetch_add(1);
  return std::make_unique<Fence>(*copies_, copies_->waited());
}

void SimulatedDevice::host_writes(std::span<const std::byte> host) { copies_->host_writes(host); }

}  // namespace castor::testing
