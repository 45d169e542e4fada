#include "core/simulator.h"

#include <algorithm>

#include "core/dry_run.h"
#include "core/service_queue.h"
#include "core/simulator_check.h"

namespace castor {
namespace {

std::size_t at(Resource resource) { return static_cast<std::size_t>(resource); }

double elements_of(const ChunkSpec& chunk) { return static_cast<double>(num_elements(chunk)); }

/// One step: a dry run by the plan, with a queue for each resource and a clock.
class Simulation final : private DryRun {
 public:
  Simulation(const Trace& trace, std::span<const double> compute_seconds, const ChunkLayout& layout,
             std::span<const Placement> placements, const Plan& plan, const Hardware& hardware,
             const OptimizerCost& optimizer, const StoredPayloads& stored)
      : DryRun(layout, placements, plan),
        trace_(trace),
        compute_seconds_(compute_seconds),
        layout_(layout),
        plan_(plan),
        hardware_(hardware),
        optimizer_(optimizer),
        chunks_(layout.chunks().size()),
        h2d_(hardware.h2d_bytes_per_second),
        d2h_(hardware.d2h_bytes_per_second),
        host_(hardware.update_bytes_per_second > 0.0 ? hardware.update_bytes_per_second
                                                     : hardware.dram_bytes_per_second),
        nvme_(layout, placements, optimizer, stored, hardware.nvme_bytes_per_second) {}

  SimulatedStep run() {
    await_params();
    if (optimizer_.overlap == Overlap::kForward) {
      order_updates();
    }
    for (event_ = 0; event_ < trace_.events().size(); ++event_) {
      step_through(trace_.events()[event_]);
    }
    result_.h2d_bytes = h2d_bytes();
    result_.demand_fetches = demand_fetches();
    result_.evictions = evictions();
    finish();
    return result_;
  }

 private:
  struct ChunkState {
    bool update_pending = true;  ///< by the step before, and not submitted yet
    double arrives = 0.0;        ///< its copy to the device is done
    double updated = 0.0;        ///< its update by the previous step is done
  };

  [[nodiscard]] bool on_device(ChunkId chunk) const { return residency().on_device(chunk); }
  [[nodiscard]] std::uint64_t nonmodel(std::size_t event) const {
    return trace_.events()[event].nonmodel_bytes;
  }
  /// At most: what an event finds lies under its own curve and that of the event before.
  [[nodiscard]] std::uint64_t nonmodel_at_entry() const {
    return event_ == 0 ? 0 : std::min(nonmodel(event_ - 1), nonmodel(event_));
  }

  void await_params() {
    fixed_device_bytes_ = hardware_.reserved_device_bytes;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const ChunkId chunk{static_cast<std::uint32_t>(i)};
      const std::uint64_t on_nvme = nvme_.stored_bytes(chunk);
      result_.nvme_bytes += on_nvme;
      (on_device(chunk) ? fixed_device_bytes_ : result_.host_bytes) +=
          payload_bytes(layout_.chunks()[i], optimizer_) - on_nvme;
    }
    note_peak(0);
  }

  void step_through(const Event& event) {
    if (event.kind == EventKind::kBackwardEnter) {
      submit_updates();
    } else if (event.kind == EventKind::kGradReady) {
      send_gradient(ChunkId{event.id});
    }
    step(event);
    note_peak(nonmodel(event_));
    clock_ += compute_seconds_[event_];
    result_.busy_seconds[at(Resource::kCompute)] += compute_seconds_[event_];
  }

  void fetch_ahead() override {
    DryRun::fetch_ahead();
    for (const ChunkId chunk : nvme_.announced(plan_, num_accesses(), residency())) {
      submit_updates_until(chunk);
      nvme_.read_ahead(chunk, clock_);
    }
  }

  bool fetch_blocks(ChunkId chunk) const override {
    return nvme_.fetch_blocks(chunk, hardware_.parameter_copies);
  }

  void fetched(ChunkId chunk) override {
    submit_updates_until(chunk);
    ChunkState& state = chunks_[index(chunk)];
    const double ready = std::max(state.updated, nvme_.begin_fetch(chunk, clock_));
    state.arrives =
        h2d_.serve(std::max(clock_, ready), static_cast<double>(layout_.chunk(chunk).used_bytes));
    if (hardware_.parameter_copies == CopyMode::kSynchronous) {
      clock_ = state.arrives;
    }
    note_peak(nonmodel_at_entry());
  }

  // No copy outlives its target.
  void evicted(ChunkId chunk) override { pinned(chunk); }

  void pinned(ChunkId chunk) override {
    clock_ = std::max(clock_, chunks_[index(chunk)].arrives);
    nvme_.end_fetch(chunk);
  }

  void send_gradient(ChunkId chunk) {
    if (on_device(chunk)) {
      return;
    }
    const std::uint64_t bytes = layout_.chunk(chunk).used_bytes / hardware_.gathering_ranks;
    const double arrived = d2h_.serve(clock_, static_cast<double>(bytes));
    // Into a window on NVMe the computing thread copies itself.
    if (hardware_.gradient_copies == CopyMode::kSynchronous || nvme_.stores_weights(chunk)) {
      clock_ = arrived;
    }
    nvme_.write_gradients(chunk, arrived);
    result_.d2h_bytes += bytes;
  }

  void note_peak(std::uint64_t nonmodel_bytes) {
    result_.peak_device_bytes = std::max(
        result_.peak_device_bytes, residency().slot_bytes() + fixed_device_bytes_ + nonmodel_bytes);
  }

  // The updates of the step before, whose gradients are all on the host: chunks in the order in
  // which this forward uses them, then those it does not use.
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
    if (spec.has_state && !on_device(chunk)) {
      const double on_device = elements_of(spec) * optimizer_.device_update_fraction;
      const double on_host = elements_of(spec) - on_device;
      const double done = std::max(serve_on_host(now, on_host * optimizer_.moved_bytes_per_element),
                                   update_over_link(on_device, now));
      chunks_[index(chunk)].updated = std::max(done, nvme_.update(chunk, now));
    }
  }

  // Pieces follow each other, so that both directions of the link are busy from the beginning.
  double update_over_link(double elements, double now) {
    if (elements == 0.0) {
      return now;
    }
    const double written = elements * optimizer_.written_bytes_per_element;
    const double read = elements * optimizer_.moved_bytes_per_element - written;
    dram_seconds_ += (read + written) / hardware_.dram_bytes_per_second;
    return std::max(h2d_.serve(now, read), d2h_.serve(now, written));
  }

  double serve_on_host(double now, double bytes) {
    dram_seconds_ += bytes / hardware_.dram_bytes_per_second;
    return host_.serve(now, bytes);
  }

  void finish() {
    submit_updates();
    // Every chunk goes to the host: no copy outlives its target, and all gradients are there.
    clock_ = std::max({clock_, h2d_.free_at(), d2h_.free_at()});
    const double arrived = clock_;
    result_.passes_seconds = arrived;
    double device_seconds = 0.0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const ChunkSpec& spec = layout_.chunks()[i];
      if (!spec.trainable) {
        continue;
      }
      const double norm_bytes = elements_of(spec) * optimizer_.norm_bytes_per_element;
      if (on_device(ChunkId{static_cast<std::uint32_t>(i)})) {
        device_seconds += (elements_of(spec) * optimizer_.moved_bytes_per_element + norm_bytes) /
                          hardware_.device_memory_bytes_per_second;
      } else if (norm_bytes > 0.0) {
        // What lies on NVMe is read ahead of this.
        const double read = nvme_.read_gradients(ChunkId{static_cast<std::uint32_t>(i)}, arrived);
        clock_ = std::max(clock_, serve_on_host(read, norm_bytes));
      }
    }
    if (optimizer_.overlap == Overlap::kNone) {
      for (std::size_t i = 0; i < chunks_.size(); ++i) {
        update_on_host(ChunkId{static_cast<std::uint32_t>(i)}, clock_);
      }
    }
    // Device and host update side by side.
    result_.busy_seconds[at(Resource::kCompute)] += device_seconds;
    double end = std::max({clock_ + device_seconds, host_.free_at(), nvme_.free_at(),
                           h2d_.free_at(), d2h_.free_at()});

    auto& busy = result_.busy_seconds;
    busy[at(Resource::kH2d)] = h2d_.busy();
    busy[at(Resource::kD2h)] = d2h_.busy();
    busy[at(Resource::kNvme)] = nvme_.busy();
    busy[at(Resource::kDram)] =
        dram_seconds_ + static_cast<double>(result_.h2d_bytes + result_.d2h_bytes) /
                            hardware_.dram_bytes_per_second;
    end = std::max(end, busy[at(Resource::kDram)]);
    if (hardware_.update_cores == UpdateCores::kShared) {
      end = std::max(end, busy[at(Resource::kCompute)] + host_.busy());
    }
    result_.step_seconds = end;
    const auto longest = std::max_element(busy.begin(), busy.end());
    result_.bound = static_cast<Resource>(longest - busy.begin());
  }

  const Trace& trace_;
  const std::span<const double> compute_seconds_;
  const ChunkLayout& layout_;
  const Plan& plan_;
  const Hardware& hardware_;
  const OptimizerCost& optimizer_;
  SimulatedStep result_;
  std::vector<ChunkState> chunks_;
  std::vector<ChunkId> updates_;  // of the step before, in their order
  std::size_t next_update_ = 0;
  std::size_t event_ = 0;
  std::uint64_t fixed_device_bytes_ = 0;
  double clock_ = 0.0;  // of the thread, or stream, that computes
  ServiceQueue h2d_;
  ServiceQueue d2h_;
  ServiceQueue host_;          // the cores that update
  double dram_seconds_ = 0.0;  // that updates and norm take of DRAM
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
