#include "store/device_updates.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "store/state_store.h"

namespace castor {
namespace {

using Clock = std::chrono::steady_clock;

/// Alignment of the arrays in a slot, which suits every load of a kernel.
constexpr std::size_t kArrayAlignment = 64;
/// Least bytes of a slot: a block of elements of every format fits in.
constexpr std::size_t kLeastSlotBytes = std::size_t{16} << 10;
/// Bounds of a fraction that adapts: each side keeps enough elements to be timed.
constexpr double kLeastShare = 0.02;
/// Growth of a fraction while the device is done before the host: large until it was not once.
constexpr double kSearchGrowth = 0.1;
constexpr double kSteadyGrowth = 0.01;

/// Arrays of a segment: parameter, gradient, master, remainder, states.
constexpr std::size_t kNumArrays = 4 + kMaxRuleStates;
constexpr std::size_t kGradArray = 1;

std::array<std::byte*, kNumArrays> arrays_of(const UpdateSegment& segment) {
  std::array<std::byte*, kNumArrays> arrays{};
  arrays[0] = static_cast<std::byte*>(segment.param);
  arrays[kGradArray] = static_cast<std::byte*>(const_cast<void*>(segment.grad));
  arrays[2] = reinterpret_cast<std::byte*>(segment.master);
  arrays[3] = reinterpret_cast<std::byte*>(segment.remainder);
  for (std::size_t i = 0; i < kMaxRuleStates; ++i) {
    arrays[4 + i] = static_cast<std::byte*>(segment.states[i]);
  }
  return arrays;
}

void set_arrays(UpdateSegment& segment, const std::array<std::byte*, kNumArrays>& arrays) {
  segment.param = arrays[0];
  segment.grad = arrays[kGradArray];
  segment.master = reinterpret_cast<float*>(arrays[2]);
  segment.remainder = reinterpret_cast<std::int16_t*>(arrays[3]);
  for (std::size_t i = 0; i < kMaxRuleStates; ++i) {
    segment.states[i] = arrays[4 + i];
  }
}

/// Returns the bytes of the first `numel` elements of one of the arrays.
std::size_t array_bytes(const UpdateRule& rule, ScalarType type, std::size_t array,
                        std::size_t numel) {
  switch (array) {
    case 0:
    case kGradArray: return numel * size_of(type);
    case 2: return numel * sizeof(float);
    case 3: return numel * sizeof(std::int16_t);
    default: return array - 4 < rule.states().size() ? rule.states()[array - 4].bytes(numel) : 0;
  }
}

/// Number of elements at whose multiples segments may be cut: those that are updated together, or
/// as many as let no two pieces share a cache line of the host.
std::size_t cut_of(const UpdateRule& rule) {
  return rule.granule() == 1 ? kArrayAlignment : rule.granule();
}

/// Returns `numel` elements of the segment, from element `begin` on.
UpdateSegment piece_of(const UpdateRule& rule, const UpdateSegment& segment, std::size_t begin,
                       std::size_t numel) {
  UpdateSegment piece = segment;
  auto arrays = arrays_of(segment);
  for (std::size_t i = 0; i < kNumArrays; ++i) {
    if (arrays[i] != nullptr) {
      arrays[i] += array_bytes(rule, segment.type, i, begin);
    }
  }
  set_arrays(piece, arrays);
  piece.numel = numel;
  piece.first_element += begin;
  return piece;
}

/// Moves `wanted` elements of the segments, and at most a cut more or less, to the result: of the
/// largest segments, since each costs a copy of each array.
std::vector<UpdateSegment> take_share(const UpdateRule& rule, std::vector<UpdateSegment>& segments,
                                      std::size_t wanted) {
  std::stable_sort(
      segments.begin(), segments.end(),
      [](const UpdateSegment& a, const UpdateSegment& b) { return a.numel > b.numel; });
  std::vector<UpdateSegment> taken;
  std::vector<UpdateSegment> left;
  const std::size_t cut = cut_of(rule);
  for (const UpdateSegment& segment : segments) {
    const std::size_t part =
        segment.numel <= wanted ? segment.numel : (wanted + cut / 2) / cut * cut;
    const std::size_t own = std::min(part, segment.numel);
    if (own > 0) {
      taken.push_back(piece_of(rule, segment, 0, own));
    }
    if (own < segment.numel) {
      left.push_back(piece_of(rule, segment, own, segment.numel - own));
    }
    wanted -= std::min(own, wanted);
  }
  segments = std::move(left);
  return taken;
}

std::size_t elements_of(std::span<const UpdateSegment> segments) {
  std::size_t numel = 0;
  for (const UpdateSegment& segment : segments) {
    numel += segment.numel;
  }
  return numel;
}

std::size_t slot_bytes(const ChunkLayout& layout, const UpdateRule& rule) {
  std::size_t largest = kLeastSlotBytes;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (chunk.has_state) {
      std::size_t bytes = 2 * chunk.used_bytes / layout.world_size();  // parameters and gradients
      for (const PayloadSpec& state : state_payloads(chunk, &rule, layout.world_size())) {
        bytes += state.bytes;
      }
      largest = std::max(largest, bytes + kNumArrays * kArrayAlignment);
    }
  }
  return align_up(std::min(largest, DeviceUpdates::kSlotBytes), kArrayAlignment);
}

std::unique_ptr<DeviceLane> make_lane(const SessionDevice& device, const UpdateRule& rule) {
  if (!device.computes_by_itself()) {
    throw UsageError(
        "device_update_fraction shares updates between the host and a GPU, and this "
        "device is the host's own; leave it out");
  }
  if (!device.kernels().has(rule.name())) {
    throw UsageError("the device has no kernel for the updates of '" + std::string(rule.name()) +
                     "', so that none of them can run there; leave device_update_fraction out");
  }
  return device.backend().make_lane();
}

}  // namespace

/// A slot of the ring that pieces are put into, until it is full.
class DeviceUpdates::Filling {
 public:
  Filling(const UpdateRule& rule, DeviceLane& lane, std::span<std::byte> slot)
      : rule_(rule), lane_(lane), slot_(slot) {}

  /// Copies the first elements of a segment into the slot, as many as there is room for, and adds
  /// the copies to `copies`. Returns the number of elements.
  std::size_t add(const UpdateSegment& segment, std::vector<CopyTicket>& copies) {
    const std::size_t numel = std::min(segment.numel, room_for(segment));
    if (numel == 0) {
      return 0;
    }
    UpdateSegment& piece = pieces_.emplace_back(piece_of(rule_, segment, 0, numel));
    auto arrays = arrays_of(piece);
    for (std::size_t i = 0; i < kNumArrays; ++i) {
      const std::size_t bytes = array_bytes(rule_, piece.type, i, numel);
      if (arrays[i] == nullptr || bytes == 0) {
        continue;
      }
      const std::span<std::byte> host(arrays[i], bytes);
      const std::span<std::byte> device = slot_.subspan(used_, bytes);
      used_ += align_up(bytes, kArrayAlignment);
      arrived_.push_back(lane_.copies().submit({.source = host,
                                                .target = device,
                                                .direction = CopyDirection::kHostToDevice,
                                                .behind = lane_.stream(),
                                                .await_source = {}}));
      copies.push_back(arrived_.back());
      if (i != kGradArray) {
        returns_.push_back({.source = device,
                            .target = host,
                            .direction = CopyDirection::kDeviceToHost,
                            .behind = lane_.stream(),
                            .await_source = {}});
      }
      arrays[i] = device.data();
    }
    set_arrays(piece, arrays);
    return numel;
  }

  /// Updates the pieces behind their copies, and copies them back. Adds the copies to `copies`.
  void run(DeviceKernels& kernels, std::vector<CopyTicket>& copies) {
    for (const CopyTicket ticket : arrived_) {
      lane_.copies().order(ticket, lane_.stream());  // each may have a failure of its own
    }
    kernels.update(rule_, pieces_, lane_.stream());
    for (const CopyRequest& request : returns_) {
      copies.push_back(lane_.copies().submit(request));
    }
  }

 private:
  [[nodiscard]] std::size_t room_for(const UpdateSegment& segment) const {
    const std::size_t cut = cut_of(rule_);
    const auto arrays = arrays_of(segment);
    std::size_t cut_bytes = 0;
    std::size_t padding = 0;
    for (std::size_t i = 0; i < kNumArrays; ++i) {
      if (arrays[i] != nullptr) {
        cut_bytes += array_bytes(rule_, segment.type, i, cut);
        padding += kArrayAlignment;
      }
    }
    const std::size_t left = slot_.size() - std::min(slot_.size(), used_ + padding);
    return left / cut_bytes * cut;
  }

  const UpdateRule& rule_;
  DeviceLane& lane_;
  const std::span<std::byte> slot_;
  std::size_t used_ = 0;
  std::vector<UpdateSegment> pieces_;
  std::vector<CopyTicket> arrived_;
  std::vector<CopyRequest> returns_;
};

/// Elements of both sides of one update, and the seconds that they took.
struct DeviceUpdates::Times {
  std::size_t on_device = 0;
  std::size_t on_host = 0;
  double device = 0.0;  // at most, if the device was done before the host
  double host = 0.0;
  bool device_was_first = false;
};

std::size_t DeviceUpdates::ring_bytes(const ChunkLayout& layout, const UpdateRule& rule) {
  return kSlots * slot_bytes(layout, rule);
}

DeviceUpdates::DeviceUpdates(const ChunkLayout& layout, const UpdateRule& rule,
                             const SessionDevice& device, MemoryTier& memory, DeviceShare share)
    : device_(device),
      adapts_(share.adapts),
      lane_(make_lane(device, rule)),
      ring_(memory.allocate(ring_bytes(layout, rule),
                            "updates on the device need a ring of that size; raise device_memory, "
                            "or leave device_update_fraction out")),
      fraction_(share.fraction) {
  device_.backend().order(device_.stream()->id(), lane_->stream());
  ring_.add_user(lane_->stream());
}

DeviceUpdates::~DeviceUpdates() = default;

void DeviceUpdates::update(const UpdateRule& rule, Executor& executor,
                           std::span<const UpdateSegment> segments) {
  std::vector<UpdateSegment> on_host(segments.begin(), segments.end());
  const MutexLock lock(mutex_);
  const double wanted = std::round(fraction() * static_cast<double>(elements_of(segments)));
  const std::vector<UpdateSegment> on_device =
      take_share(rule, on_host, static_cast<std::size_t>(wanted));
  Times times{.on_device = elements_of(on_device), .on_host = elements_of(on_host)};
  const auto begin = Clock::now();
  const auto seconds = [begin] {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  try {
    run_on_device(rule, on_device);
    const double submitted = seconds();
    if (!on_host.empty()) {
      rule.update(executor, on_host);
    }
    times.host = seconds() - submitted;
    times.device_was_first = lane_->copies().done(last_out_[slot_]);
    for (const CopyTicket ticket : copies_) {
      lane_->copies().wait(ticket);
    }
    times.device = seconds();
  } catch (...) {
    abandon();
    throw;
  }
  updated_ += times.on_device;
  if (adapts_) {
    adapt(times);
  }
}

// The kernel of a slot is behind the copies into it, and what reuses the slot behind those out of
// it. So the copies of both directions go on at once, and the host waits for none of them.
void DeviceUpdates::run_on_device(const UpdateRule& rule, std::span<const UpdateSegment> segments) {
  const std::size_t bytes = ring_.bytes() / kSlots;
  copies_.clear();
  std::size_t next = 0;
  std::size_t begin = 0;  // of segment `next`, what is under way already
  while (next < segments.size()) {
    const std::size_t slot = (slot_ + 1) % kSlots;
    lane_->copies().order(last_out_[slot], lane_->stream());
    Filling filling(rule, *lane_, std::span(ring_.data() + slot * bytes, bytes));
    while (next < segments.size()) {
      const UpdateSegment rest =
          piece_of(rule, segments[next], begin, segments[next].numel - begin);
      const std::size_t taken = filling.add(rest, copies_);
      begin += taken;
      if (begin == segments[next].numel) {
        ++next;
        begin = 0;
      } else {
        break;  // the slot is full
      }
    }
    slot_ = slot;
    filling.run(device_.kernels(), copies_);
    last_out_[slot] = copies_.back();
  }
}

// Whoever is told of a failure may free the memory of the segments.
void DeviceUpdates::abandon() noexcept {
  for (const CopyTicket ticket : copies_) {
    try {
      lane_->copies().wait(ticket);
    } catch (const std::exception&) {  // the failure that is on its way already, or one behind it
    }
  }
}

// A device that was slower than the host has told its speed. Of one that was faster only a bound is
// known: it is given a little more each time, until it is slower.
void DeviceUpdates::adapt(const Times& times) {
  if (times.on_device == 0 || times.on_host == 0) {
    return;
  }
  double fraction = fraction_.load();
  if (times.device_was_first) {
    fraction += (1.0 - fraction) * (overshot_ ? kSteadyGrowth : kSearchGrowth);
  } else {
    overshot_ = true;
    const double device = static_cast<double>(times.on_device) / times.device;
    const double host = static_cast<double>(times.on_host) / times.host;
    fraction = device / (device + host);
  }
  fraction_ = std::clamp(fraction, kLeastShare, 1.0 - kLeastShare);
}

}  // namespace castor
