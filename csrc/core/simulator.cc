#include "core/simulator.h"

#include <algorithm>

#include "core/eviction_order.h"
#include "core/service_queue.h"
#include "core/simulator_check.h"

namespace castor {
namespace {

std::size_t at(Resource resource) { return static_cast<std::size_t>(resource); }

double elements_of(const ChunkSpec& chunk) { return static_cast<double>(num_elements(chunk)); }

/// One step. Decisions mirror Runtime and ChunkManager, which act on the same plan.
class Simulation {
 public:
  Simulation(const Trace& trace, std::span<const double> compute_seconds, const ChunkLayout& layout,
             std::span<const Placement> placements, const Plan& plan, const Hardware& hardware,
             const OptimizerCost& optimizer, const StoredPayloads& stored)
      : trace_(trace),
        compute_seconds_(compute_seconds),
        layout_(layout),
        placements_(placements),
        plan_(plan),
        hardware_(hardware),
        optimizer_(optimizer),
        chunks_(layout.chunks().size()),
        resident_(layout.chunks().size(), false),
        evictable_(layout.chunks().size()),
        h2d_(hardware.h2d_bytes_per_second),
        d2h_(hardware.d2h_bytes_per_second),
        dram_(hardware.dram_bytes_per_second),
        nvme_(layout, placements, optimizer, stored, hardware.nvme_bytes_per_second) {}

  SimulatedStep run() {
    take_homes();
    if (optimizer_.overlap == Overlap::kForward) {
      order_updates();
    }
    for (event_ = 0; event_ < trace_.events().size(); ++event_) {
      step_through(trace_.events()[event_]);
    }
    finish();
    return result_;
  }

 private:
  struct ChunkState {
    std::uint32_t pins = 0;
    std::uint64_t next_use = kNeverUsed;
    bool update_pending = true;  ///< by the step before, and not submitted yet
    double arrives = 0.0;        ///< its copy to the device is done
    double updated = 0.0;        ///< its update by the previous step is done
  };

  [[nodiscard]] bool on_device(ChunkId chunk) const {
    return placements_[index(chunk)] == Placement::kDevice;
  }
  [[nodiscard]] std::uint64_t nonmodel(std::size_t event) const {
    return trace_.events()[event].nonmodel_bytes;
  }
  /// At most: what an event finds lies under its own curve and that of the event before.
  [[nodiscard]] std::uint64_t nonmodel_at_entry() const {
    return event_ == 0 ? 0 : std::min(nonmodel(event_ - 1), nonmodel(event_));
  }

  void take_homes() {
    fixed_device_bytes_ = hardware_.gradient_window_bytes;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const std::uint64_t on_nvme = nvme_.stored_bytes(ChunkId{static_cast<std::uint32_t>(i)});
      result_.nvme_bytes += on_nvme;
      (placements_[i] == Placement::kDevice ? fixed_device_bytes_ : result_.host_bytes) +=
          payload_bytes(layout_.chunks()[i], optimizer_) - on_nvme;
    }
    note_peak(0);
  }

  void step_through(const Event& event) {
    switch (event.kind) {
      case EventKind::kForwardEnter:
        if (event.id == 0) {
          frames_.clear();
          unpin_from(&forward_pins_, 0);
        }
        unpin_from(&backward_pins_, 0);
        frames_.push_back({ModuleId{event.id}, forward_pins_.size()});
        acquire(&forward_pins_);
        break;
      case EventKind::kForwardExit: exit(ModuleId{event.id}); break;
      case EventKind::kBackwardEnter:
        submit_updates();
        unpin_from(&backward_pins_, 0);
        acquire(&backward_pins_);
        break;
      case EventKind::kGradReady: send_gradient(ChunkId{event.id}); break;
    }
    note_peak(nonmodel(event_));
    clock_ += compute_seconds_[event_];
    result_.busy_seconds[at(Resource::kCompute)] += compute_seconds_[event_];
  }

  void exit(ModuleId module) {
    const auto is_module = [module](const Frame& frame) { return frame.module == module; };
    const auto frame = std::find_if(frames_.rbegin(), frames_.rend(), is_module);
    if (frame != frames_.rend()) {
      unpin_from(&forward_pins_, frame->first_pin);
      frames_.erase(frame.base() - 1, frames_.end());
    }
  }

  void acquire(std::vector<ChunkId>* pins) {
    const PlannedAccess& access = plan_.accesses()[access_++];
    const auto& needed = layout_.chunks_of(access.module);
    const auto next_uses = plan_.next_uses(access, needed.size());
    const std::uint64_t now = access_ - 1;
    std::vector<ChunkId> missing;
    for (std::size_t i = 0; i < needed.size(); ++i) {
      set_next_use(needed[i], next_uses[i]);
      if (on_device(needed[i])) {
        // Its update ran where it lies, before the step.
      } else if (resident_[index(needed[i])]) {
        pin(needed[i], pins);
      } else {
        missing.push_back(needed[i]);
      }
    }
    for (const ChunkId chunk : missing) {
      make_room(capacity(chunk), access.slot_cap_bytes, now, 0);
      fetch(chunk);
      ++result_.demand_fetches;
      pin(chunk, pins);
    }
    make_room(0, access.slot_cap_bytes, now, 0);
    for (const Prefetch& ahead : plan_.prefetches(access)) {
      if (!resident_[index(ahead.chunk)] &&
          !nvme_.fetch_blocks(ahead.chunk, hardware_.parameter_copies)) {
        set_next_use(ahead.chunk, ahead.used_at);
        make_room(capacity(ahead.chunk), ahead.slot_cap_bytes, now, ahead.used_at + 1);
        fetch(ahead.chunk);
        evictable_put(ahead.chunk);
      }
    }
    for (const ChunkId chunk : nvme_.announced(plan_, access_, resident_)) {
      submit_updates_until(chunk);
      nvme_.read_ahead(chunk, clock_);
    }
  }

  [[nodiscard]] std::size_t capacity(ChunkId chunk) const {
    return layout_.chunk(chunk).capacity_bytes;
  }

  void set_next_use(ChunkId chunk, std::uint64_t next_use) {
    chunks_[index(chunk)].next_use = next_use;
    if (evictable_.contains(chunk)) {
      evictable_.put(chunk, next_use);
    }
  }

  void make_room(std::size_t bytes, std::size_t cap, std::uint64_t now, std::uint64_t horizon) {
    while (slot_bytes_ + bytes > cap) {
      const auto victim = evictable_.victim_from(now, horizon);
      if (!victim) {
        return;
      }
      evictable_.remove(*victim);
      resident_[index(*victim)] = false;
      clock_ = std::max(clock_, chunks_[index(*victim)].arrives);  // no copy outlives its target
      nvme_.end_fetch(*victim);
      slot_bytes_ -= capacity(*victim);
      ++result_.evictions;
    }
  }

  void fetch(ChunkId chunk) {
    submit_updates_until(chunk);
    ChunkState& state = chunks_[index(chunk)];
    const std::uint64_t bytes = layout_.chunk(chunk).used_bytes;
    resident_[index(chunk)] = true;
    const double at_home = std::max(state.updated, nvme_.begin_fetch(chunk, clock_));
    state.arrives = h2d_.serve(std::max(clock_, at_home), static_cast<double>(bytes));
    if (hardware_.parameter_copies == CopyMode::kSynchronous) {
      clock_ = state.arrives;
    }
    slot_bytes_ += capacity(chunk);
    result_.h2d_bytes += bytes;
    note_peak(nonmodel_at_entry());
  }

  void pin(ChunkId chunk, std::vector<ChunkId>* pins) {
    ChunkState& state = chunks_[index(chunk)];
    clock_ = std::max(clock_, state.arrives);
    nvme_.end_fetch(chunk);
    if (state.pins++ == 0) {
      evictable_.remove(chunk);
    }
    pins->push_back(chunk);
  }

  void unpin_from(std::vector<ChunkId>* pins, std::size_t first) {
    while (pins->size() > first) {
      const ChunkId chunk = pins->back();
      pins->pop_back();
      if (--chunks_[index(chunk)].pins == 0) {
        evictable_put(chunk);
      }
    }
  }

  void evictable_put(ChunkId chunk) {
    if (placements_[index(chunk)] == Placement::kStream) {
      evictable_.put(chunk, chunks_[index(chunk)].next_use);
    }
  }

  void send_gradient(ChunkId chunk) {
    if (on_device(chunk)) {
      return;
    }
    const std::uint64_t bytes = layout_.chunk(chunk).used_bytes;
    const double home = d2h_.serve(clock_, static_cast<double>(bytes));
    // Into a window on NVMe the computing thread copies itself.
    if (hardware_.gradient_copies == CopyMode::kSynchronous || nvme_.stores_weights(chunk)) {
      clock_ = home;
    }
    nvme_.write_gradients(chunk, home);
    result_.d2h_bytes += bytes;
  }

  void note_peak(std::uint64_t nonmodel_bytes) {
    result_.peak_device_bytes =
        std::max(result_.peak_device_bytes, slot_bytes_ + fixed_device_bytes_ + nonmodel_bytes);
  }

  // The updates of the step before, whose gradients are all at home: chunks in the order in which
  // this forward uses them, then those it does not use.
  void order_updates() {
    std::vector<bool> listed(chunks_.size(), false);
    const auto list = [&](ChunkId chunk) {
      if (!listed[index(chunk)]) {
        listed[index(chunk)] = true;
        updates_.push_back(chunk);
      }
    };
    for (const PlannedAccess& access : plan_.accesses()) {
      for (const ChunkId chunk : layout_.chunks_of(access.module)) {
        list(chunk);
      }
    }
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      list(ChunkId{static_cast<std::uint32_t>(i)});
    }
  }

  // They could all begin at 0. Those that forward does not need yet are submitted as late as it
  // does: so they share NVMe with its reads in the order in which both are needed.
  void submit_updates_until(ChunkId chunk) {
    while (next_update_ < updates_.size() && chunks_[index(chunk)].update_pending) {
      submit_update();
    }
  }
  void submit_updates() {
    while (next_update_ < updates_.size()) {
      submit_update();
    }
  }

  void submit_update() {
    const ChunkId chunk = updates_[next_update_++];
    chunks_[index(chunk)].update_pending = false;
    update_on_host(chunk, 0.0);
  }

  void update_on_host(ChunkId chunk, double now) {
    const ChunkSpec& spec = layout_.chunk(chunk);
    if (spec.trainable && !on_device(chunk)) {
      const double done = dram_.serve(now, elements_of(spec) * optimizer_.moved_bytes_per_element);
      chunks_[index(chunk)].updated = std::max(done, nvme_.update(chunk, now));
    }
  }

  void finish() {
    submit_updates();
    // Every chunk goes home: no copy outlives its target, and all gradients are there.
    clock_ = std::max({clock_, h2d_.free_at(), d2h_.free_at()});
    const double home = clock_;
    double device_seconds = 0.0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const ChunkSpec& spec = layout_.chunks()[i];
      if (!spec.trainable) {
        continue;
      }
      const double norm_bytes = elements_of(spec) * optimizer_.norm_bytes_per_element;
      if (placements_[i] == Placement::kDevice) {
        device_seconds += (elements_of(spec) * optimizer_.moved_bytes_per_element + norm_bytes) /
                          hardware_.device_memory_bytes_per_second;
      } else if (norm_bytes > 0.0) {
        // What lies on NVMe is read ahead of this.
        const double read = nvme_.read_gradients(ChunkId{static_cast<std::uint32_t>(i)}, home);
        clock_ = std::max(clock_, dram_.serve(read, norm_bytes));
      }
    }
    if (optimizer_.overlap == Overlap::kNone) {
      for (std::size_t i = 0; i < chunks_.size(); ++i) {
        update_on_host(ChunkId{static_cast<std::uint32_t>(i)}, clock_);
      }
    }
    // Device and host update side by side.
    result_.busy_seconds[at(Resource::kCompute)] += device_seconds;
    double end = std::max({clock_ + device_seconds, dram_.free_at(), nvme_.free_at()});

    const double updates = dram_.busy();
    auto& busy = result_.busy_seconds;
    busy[at(Resource::kH2d)] = h2d_.busy();
    busy[at(Resource::kD2h)] = d2h_.busy();
    busy[at(Resource::kNvme)] = nvme_.busy();
    busy[at(Resource::kDram)] =
        updates + static_cast<double>(result_.h2d_bytes + result_.d2h_bytes) /
                      hardware_.dram_bytes_per_second;
    end = std::max(end, busy[at(Resource::kDram)]);
    if (hardware_.update_cores == UpdateCores::kShared) {
      end = std::max(end, busy[at(Resource::kCompute)] + updates);
    }
    result_.step_seconds = end;
    const auto longest = std::max_element(busy.begin(), busy.end());
    result_.bound = static_cast<Resource>(longest - busy.begin());
  }

  struct Frame {
    ModuleId module;
    std::size_t first_pin;
  };

  const Trace& trace_;
  const std::span<const double> compute_seconds_;
  const ChunkLayout& layout_;
  const std::span<const Placement> placements_;
  const Plan& plan_;
  const Hardware& hardware_;
  const OptimizerCost& optimizer_;
  SimulatedStep result_;
  std::vector<ChunkState> chunks_;
  std::vector<bool> resident_;    // per chunk
  std::vector<ChunkId> updates_;  // of the step before, in their order
  std::size_t next_update_ = 0;
  EvictionOrder evictable_;
  std::vector<Frame> frames_;
  std::vector<ChunkId> forward_pins_;
  std::vector<ChunkId> backward_pins_;
  std::size_t event_ = 0;
  std::size_t access_ = 0;  // accesses begun
  std::uint64_t slot_bytes_ = 0;
  std::uint64_t fixed_device_bytes_ = 0;
  double clock_ = 0.0;  // of the thread, or stream, that computes
  ServiceQueue h2d_;
  ServiceQueue d2h_;
  ServiceQueue dram_;
  SimulatedNvme nvme_;
};

}  // namespace

SimulatedStep simulate_step(const Trace& trace, std::span<const double> compute_seconds,
                            const ChunkLayout& layout, std::span<const Placement> placements,
                            const Plan& plan, const Hardware& hardware,
                            const OptimizerCost& optimizer, const StoredPayloads& stored) {
  check_simulation(trace, compute_seconds, layout, placements, plan);
  check_hardware(hardware);
  check_optimizer_cost(optimizer);
  return Simulation(trace, compute_seconds, layout, placements, plan, hardware, optimizer, stored)
      .run();
}

}  // namespace castor
