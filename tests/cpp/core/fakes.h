#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_layout.h"
#include "core/chunk_manager.h"
#include "core/copy_engine.h"
#include "core/error.h"
#include "core/fake_param_store.h"
#include "core/memory_tier.h"

// Simulated hardware for the tests of the core: tiers on the heap, copies that happen when the test
// says so, parameters that are bytes.
namespace castor::testing {

inline constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

/// The blocks of a HeapArena that are alive. Shared by the test and the arena. Thread-safe.
class LiveBlocks {
 public:
  void add(const std::byte* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_.emplace(data, bytes);
    bytes_ += bytes;
  }
  void remove(const std::byte* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(data);
    ASSERT_NE(block, blocks_.end()) << "freed what was not allocated";
    EXPECT_EQ(block->second, bytes) << "freed with another size";
    bytes_ -= block->second;
    blocks_.erase(block);
  }
  /// What the arena was last told to keep of free blocks.
  void note_kept(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    kept_ = bytes;
  }
  [[nodiscard]] std::size_t kept() const {
    const std::lock_guard lock(mutex_);
    return kept_;
  }
  /// Size of the live block that starts at `data`, 0 if there is none.
  [[nodiscard]] std::size_t bytes_at(const std::byte* data) const {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(data);
    return block == blocks_.end() ? 0 : block->second;
  }
  [[nodiscard]] std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }
  [[nodiscard]] std::size_t count() const {
    const std::lock_guard lock(mutex_);
    return blocks_.size();
  }

 private:
  mutable std::mutex mutex_;  // guards everything below
  std::map<const std::byte*, std::size_t> blocks_;
  std::size_t bytes_ = 0;
  std::size_t kept_ = 0;
};

/// Memory from the heap, filled with garbage: nothing may rely on zeros, and ASan sees stale reads.
class HeapArena : public Arena {
 public:
  explicit HeapArena(std::shared_ptr<LiveBlocks> live) : live_(std::move(live)) {}

  std::byte* allocate(std::size_t bytes) override {
    auto* data = static_cast<std::byte*>(::operator new(bytes, kAlignment));
    std::memset(data, 0xA5, bytes);
    live_->add(data, bytes);
    return data;
  }
  void deallocate(std::byte* data, std::size_t bytes) noexcept override {
    live_->remove(data, bytes);
    ::operator delete(data, kAlignment);
  }
  void trim(std::size_t keep, std::size_t /*next*/) noexcept override { live_->note_kept(keep); }
  void discard(std::byte* data, std::size_t bytes) noexcept override {
    std::memset(data, 0x5A, bytes);  // a read of what was discarded shows
  }
  std::string description() const override { return "heap"; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  std::shared_ptr<LiveBlocks> live_;
};

/// Adversary: the operating system refuses the n-th allocation (counted from 1).
class FailingArena final : public HeapArena {
 public:
  FailingArena(std::shared_ptr<LiveBlocks> live, std::size_t refused_call)
      : HeapArena(std::move(live)), calls_left_(refused_call) {}

  std::byte* allocate(std::size_t bytes) override {
    if (--calls_left_ == 0) {
      throw OutOfMemory(TierKind::kHost, bytes, 0, bytes, "injected");
    }
    return HeapArena::allocate(bytes);
  }

 private:
  std::atomic<std::size_t> calls_left_;
};

/// Adversary: the slowest engine the contract allows. Nothing is copied until somebody waits, and
/// then only what the ticket stands behind in its direction. Its destructor runs what is left:
/// a copy that outlives its buffer is a use after free. Not thread-safe.
class DelayedCopyEngine : public CopyEngine {
 public:
  ~DelayedCopyEngine() override {
    for (auto& queue : pending_) {
      for (const Copy& copy : queue) {
        perform(copy.request);
      }
    }
  }

  CopyTicket submit(const CopyRequest& request) override {
    EXPECT_EQ(request.source.size(), request.target.size());
    EXPECT_NE(request.source.data(), nullptr);
    EXPECT_NE(request.target.data(), nullptr);
    queue_of(request).push_back({CopyTicket{++last_ticket_}, request});
    return CopyTicket{last_ticket_};
  }
  void wait(CopyTicket ticket) override {
    EXPECT_LE(static_cast<std::uint64_t>(ticket), last_ticket_);
    for (auto& queue : pending_) {
      if (holds(queue, ticket)) {
        while (!queue.empty() && queue.front().ticket <= ticket) {
          perform_first(queue);
        }
      }
    }
    if (const auto failed = failures_.find(ticket); failed != failures_.end()) {
      const std::exception_ptr failure = failed->second;
      failures_.erase(failed);
      std::rethrow_exception(failure);
    }
  }
  bool done(CopyTicket ticket) override {
    return !holds(pending_[0], ticket) && !holds(pending_[1], ticket);
  }
  [[nodiscard]] bool asynchronous() const noexcept override { return true; }
  [[nodiscard]] std::size_t num_pending() const { return pending_[0].size() + pending_[1].size(); }

 protected:
  struct Copy {
    CopyTicket ticket;
    CopyRequest request;
  };
  using Queue = std::deque<Copy>;

  static bool holds(const Queue& queue, CopyTicket ticket) {
    for (const Copy& copy : queue) {
      if (copy.ticket == ticket) {
        return true;
      }
    }
    return false;
  }
  static void perform(const CopyRequest& request) {
    if (request.await_source) {
      request.await_source();
    }
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }
  /// A failure is kept for who waits for the copy.
  void perform_first(Queue& queue) {
    const Copy copy = std::move(queue.front());
    queue.pop_front();
    try {
      perform(copy.request);
    } catch (const InjectedFailure&) {
      failures_.emplace(copy.ticket, std::current_exception());
    }
  }
  Queue& queue_of(const CopyRequest& request) {
    return pending_[request.direction == CopyDirection::kHostToDevice ? 0 : 1];
  }

  Queue pending_[2];

 private:
  std::map<CopyTicket, std::exception_ptr> failures_;
  std::uint64_t last_ticket_ = 0;
};

/// Adversary: a delayed engine whose n-th submit is refused, or whose n-th wait for a copy copies
/// half of it and throws. Counts run from 1, from the moment fail_* is called, by any thread.
class FailingCopyEngine final : public DelayedCopyEngine {
 public:
  void fail_submit(std::size_t call) { submits_left_ = call; }
  void fail_wait(std::size_t call) { waits_left_ = call; }
  void never_fail() {
    submits_left_ = kNever;
    waits_left_ = kNever;
  }

  CopyTicket submit(const CopyRequest& request) override {
    if (--submits_left_ == 0) {
      throw InjectedFailure("submit");
    }
    return DelayedCopyEngine::submit(request);
  }
  void wait(CopyTicket ticket) override {
    for (Queue& queue : pending_) {
      if (holds(queue, ticket) && --waits_left_ == 0) {
        while (queue.front().ticket != ticket) {
          perform_first(queue);
        }
        CopyRequest half = queue.front().request;
        half.source = half.source.first(half.source.size() / 2);
        queue.pop_front();
        perform(half);
        throw InjectedFailure("wait");
      }
    }
    DelayedCopyEngine::wait(ticket);
  }

 private:
  std::atomic<std::size_t> submits_left_ = kNever;
  std::atomic<std::size_t> waits_left_ = kNever;
};

/// Updates that happen when somebody waits for them, never before.
class FakeUpdates final : public PendingUpdates {
 public:
  void submit(ChunkId chunk, std::function<void()> update) {
    updates_.emplace(chunk, std::move(update));
  }
  [[nodiscard]] bool pending(ChunkId chunk) const noexcept override {
    return updates_.contains(chunk);
  }
  void wait(ChunkId chunk) override {
    if (const auto found = updates_.find(chunk); found != updates_.end()) {
      const auto update = std::move(found->second);
      updates_.erase(found);
      update();
    }
  }

 private:
  std::map<ChunkId, std::function<void()>> updates_;
};

/// Parameters as plain bytes: an address per chunk, a version counter per parameter. Guarded by
/// whatever guards the chunk manager.
class FakeBinder final : public ParamBinder {
 public:
  explicit FakeBinder(const ChunkLayout& layout)
      : layout_(layout),
        addresses_(layout.chunks().size(), nullptr),
        versions_(layout.params().size(), 0),
        snapshots_(layout.params().size(), 0) {}

  /// Host storage that is not in memory is bound to nullptr.
  void param_store(std::vector<bool> stored) { stored_ = std::move(stored); }
  void bind(ChunkId chunk, std::byte* address) noexcept override {
    EXPECT_TRUE(address != nullptr || (!stored_.empty() && stored_[index(chunk)]));
    addresses_[index(chunk)] = address;
    ++num_binds_;
  }
  void snapshot(ChunkId chunk) noexcept override {
    for (const ParamId param : layout_.chunk(chunk).params) {
      snapshots_[index(param)] = versions_[index(param)];
    }
  }
  bool written_since_snapshot(ChunkId chunk) const noexcept override {
    for (const ParamId param : layout_.chunk(chunk).params) {
      if (snapshots_[index(param)] != versions_[index(param)]) {
        return true;
      }
    }
    return false;
  }

  void before_write_back(ChunkId chunk, const std::byte* host, const std::byte* slot) override {
    write_backs_.push_back({chunk, host[0], slot[0]});
  }

  /// The first byte of host storage and slot at each before_write_back.
  struct WriteBack {
    ChunkId chunk;
    std::byte host;
    std::byte slot;
  };
  [[nodiscard]] const std::vector<WriteBack>& write_backs() const { return write_backs_; }

  [[nodiscard]] std::byte* address(ChunkId chunk) const { return addresses_[index(chunk)]; }
  [[nodiscard]] std::byte* address(ParamId param) const {
    const ParamPlace place = layout_.place(param);
    return addresses_[index(place.chunk)] + place.offset * size_of(layout_.param(param).type);
  }
  [[nodiscard]] std::size_t bytes(ParamId param) const {
    return layout_.param(param).numel * size_of(layout_.param(param).type);
  }
  [[nodiscard]] std::size_t num_binds() const { return num_binds_; }

  /// What user code does: an in-place write through the parameter.
  void write(ParamId param, std::uint8_t value) {
    std::memset(address(param), value, bytes(param));
    ++versions_[index(param)];
  }
  /// Whether every byte of the parameter is `value`, read as user code reads.
  [[nodiscard]] bool reads(ParamId param, std::uint8_t value) const {
    const std::byte* data = address(param);
    for (std::size_t i = 0; i < bytes(param); ++i) {
      if (data[i] != std::byte{value}) {
        return false;
      }
    }
    return true;
  }

 private:
  const ChunkLayout& layout_;
  std::vector<std::byte*> addresses_;
  std::vector<std::uint32_t> versions_;
  std::vector<std::uint32_t> snapshots_;
  std::size_t num_binds_ = 0;
  std::vector<bool> stored_;
  std::vector<WriteBack> write_backs_;
};

/// Builds a model. At kChunk bytes a chunk, a parameter of kWhole elements fills one.
struct Net {
  static constexpr std::size_t kChunk = 256;
  static constexpr std::size_t kWhole = 64;

  std::vector<ParamSpec> params;
  std::vector<ModuleSpec> modules;

  /// A module with one float32 parameter for each of `numels`.
  ModuleId add(std::initializer_list<std::size_t> numels,
               std::optional<ModuleId> parent = std::nullopt) {
    std::vector<ParamId> own;
    for (const std::size_t numel : numels) {
      own.push_back(static_cast<ParamId>(params.size()));
      params.push_back({"p" + std::to_string(params.size()), numel, ScalarType::kFloat32, true});
    }
    return add_sharing(std::move(own), parent);
  }
  /// A module over parameters that exist.
  ModuleId add_sharing(std::vector<ParamId> own, std::optional<ModuleId> parent = std::nullopt) {
    modules.push_back({"m" + std::to_string(modules.size()), std::move(own), parent});
    return static_cast<ModuleId>(modules.size() - 1);
  }
  [[nodiscard]] ChunkLayout layout(std::size_t chunk_bytes = kChunk) const {
    return ChunkLayout(params, modules, {.chunk_bytes = chunk_bytes});
  }
  /// `count` modules of one chunk each: module i owns parameter i, in chunk i.
  static Net row(std::size_t count) {
    Net net;
    for (std::size_t i = 0; i < count; ++i) {
      net.add({kWhole});
    }
    return net;
  }
};

/// A chunk manager on simulated hardware. Every parameter starts bound to host storage and filled
/// with initial(param).
struct Rig {
  ChunkLayout layout;
  std::shared_ptr<LiveBlocks> device_blocks = std::make_shared<LiveBlocks>();
  std::shared_ptr<LiveBlocks> host_blocks = std::make_shared<LiveBlocks>();
  std::shared_ptr<MemoryTier> device;
  std::shared_ptr<MemoryTier> host;
  FailingCopyEngine engine;
  FakeBinder binder;
  FakeParamStore store;
  std::unique_ptr<ChunkManager> manager;
  std::vector<std::shared_ptr<Payload>> host_payloads;

  Rig(ChunkLayout model, std::size_t device_bytes, std::vector<Placement> placements = {},
      std::vector<bool> stored = {})
      : Rig(std::move(model), std::make_shared<Budget>(TierKind::kDevice, device_bytes), {},
            std::move(placements), std::move(stored)) {}
  /// On a budget that others take from too.
  Rig(ChunkLayout model, std::shared_ptr<Budget> budget, std::string owner,
      std::vector<Placement> placements = {}, std::vector<bool> stored = {})
      : layout(std::move(model)),
        device(std::make_shared<MemoryTier>(std::move(budget), std::move(owner),
                                            std::make_unique<HeapArena>(device_blocks))),
        host(std::make_shared<MemoryTier>(TierKind::kHost, std::size_t{1} << 30,
                                          std::make_unique<HeapArena>(host_blocks))),
        binder(layout),
        store(layout, sized(stored, layout.chunks().size())) {
    placements.resize(layout.chunks().size(), Placement::kStream);
    binder.param_store(sized(stored, layout.chunks().size()));
    manager = std::make_unique<ChunkManager>(layout, placements, device, host, engine, binder,
                                             stored.empty() ? nullptr : &store);
    for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
      const ChunkId chunk{static_cast<std::uint32_t>(i)};
      host_payloads.push_back(manager->payload(chunk, PayloadKind::kParam));
      binder.bind(chunk, host_payloads[i]->data());
    }
    for (std::size_t i = 0; i < layout.params().size(); ++i) {
      write(ParamId{static_cast<std::uint32_t>(i)}, initial(i));
    }
  }

  static std::uint8_t initial(std::size_t param) { return static_cast<std::uint8_t>(param + 1); }

  /// As the binder's, with host storage that has to be brought into memory first, as user code sees
  /// it.
  void write(ParamId param, std::uint8_t value) {
    visit(param, ParamAccess::kWrite, [&] { binder.write(param, value); });
  }
  [[nodiscard]] bool reads(ParamId param, std::uint8_t value) {
    bool equal = false;
    visit(param, ParamAccess::kRead, [&] { equal = binder.reads(param, value); });
    return equal;
  }

  /// nullptr where it is not in memory.
  [[nodiscard]] const std::byte* host_storage(ChunkId chunk) const {
    return host_payloads[index(chunk)]->data();
  }
  [[nodiscard]] bool bound_to_host(ChunkId chunk) const {
    return binder.address(chunk) == host_storage(chunk);
  }
  /// Whether the host copy of the parameter is all `value`.
  [[nodiscard]] bool host_storage_holds(ParamId param, std::uint8_t value) const {
    const ParamPlace place = layout.place(param);
    const std::byte* const chunk =
        store.stored(place.chunk) ? store.disk(place.chunk) : host_storage(place.chunk);
    const std::byte* data = chunk + place.offset * size_of(layout.param(param).type);
    for (std::size_t i = 0; i < binder.bytes(param); ++i) {
      if (data[i] != std::byte{value}) {
        return false;
      }
    }
    return true;
  }

  /// What holds between any two calls, whatever was done.
  void expect_consistent() const {
    std::size_t slots = 0;
    std::size_t pinned = 0;
    std::size_t fixed = 0;
    for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
      const ChunkId chunk{static_cast<std::uint32_t>(i)};
      const ChunkSpec& spec = layout.chunk(chunk);
      if (manager->placement(chunk) == Placement::kDevice) {
        fixed += manager->on_device_bytes(chunk);
        EXPECT_TRUE(manager->resident(chunk));
        EXPECT_TRUE(bound_to_host(chunk));
        continue;
      }
      slots += manager->resident(chunk) ? spec.capacity_bytes : 0;
      pinned += manager->pins(chunk) > 0 ? spec.capacity_bytes : 0;
      EXPECT_TRUE(manager->resident(chunk) || manager->pins(chunk) == 0);
      EXPECT_TRUE(manager->resident(chunk) || bound_to_host(chunk)) << "chunk " << i;
      EXPECT_TRUE(manager->pins(chunk) == 0 || !bound_to_host(chunk)) << "chunk " << i;
      if (!bound_to_host(chunk)) {
        EXPECT_EQ(device_blocks->bytes_at(binder.address(chunk)), spec.capacity_bytes)
            << "chunk " << i << " is bound to memory that is neither its host storage nor a slot";
      }
    }
    EXPECT_EQ(manager->slot_bytes(), slots);
    EXPECT_EQ(manager->pinned_bytes(), pinned);
    EXPECT_EQ(device_blocks->bytes(), slots + fixed);
    EXPECT_LE(device->ledger().used(), device->ledger().budget());
    EXPECT_GE(device->ledger().used(), slots + fixed) << "non-model bytes may add to it";
  }

 private:
  static std::vector<bool> sized(std::vector<bool> stored, std::size_t chunks) {
    stored.resize(chunks, false);
    return stored;
  }
  void visit(ParamId param, ParamAccess access, const std::function<void()>& use) {
    const ChunkId chunk = layout.place(param).chunk;
    if (binder.address(chunk) != nullptr) {
      use();
      return;
    }
    const auto lease = store.lease(chunk);
    lease->wait(access);
    binder.bind(chunk, lease->data());
    use();
    binder.bind(chunk, nullptr);
  }
};

inline constexpr ChunkId chunk_id(std::size_t i) { return static_cast<ChunkId>(i); }
inline constexpr ParamId param_id(std::size_t i) { return static_cast<ParamId>(i); }
inline constexpr ModuleId module_id(std::size_t i) { return static_cast<ModuleId>(i); }

}  // namespace castor::testing
