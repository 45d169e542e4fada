#include "torch/optimizer_state.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/placement.h"
#include "torch/stored_weights.h"

// What lies where, and the update. Values are in optimizer_state_values.cc.
namespace castor {
namespace {

bool in_blocks(StateFormat format) { return format == StateFormat::kSplitInt8; }

std::vector<PayloadKind> state_kinds(const ChunkSpec& chunk, StateFormat format, bool moments) {
  std::vector<PayloadKind> kinds;
  if (!chunk.trainable) {
    return kinds;
  }
  if (format != StateFormat::kFp32) {
    kinds.push_back(PayloadKind::kRemainder);
  } else if (chunk.type != ScalarType::kFloat32) {
    kinds.push_back(PayloadKind::kMaster);
  }
  if (moments) {
    kinds.push_back(PayloadKind::kExpAvg);
    kinds.push_back(PayloadKind::kExpAvgSq);
    if (in_blocks(format)) {
      kinds.push_back(PayloadKind::kMomentScales);
    }
  }
  return kinds;
}

// Of `numel` elements.
std::size_t bytes_of(PayloadKind kind, std::size_t numel, ScalarType type, StateFormat format) {
  const StateBytes bytes = state_bytes(format);
  switch (kind) {
    case PayloadKind::kParam:
    case PayloadKind::kGrad: return numel * size_of(type);
    case PayloadKind::kMaster: return numel * bytes.master;
    case PayloadKind::kRemainder: return numel * bytes.remainder;
    case PayloadKind::kExpAvg: return numel * bytes.exp_avg;
    case PayloadKind::kExpAvgSq: return numel * bytes.exp_avg_sq;
    case PayloadKind::kMomentScales: return num_moment_blocks(numel) * sizeof(MomentScales);
  }
  return 0;
}

}  // namespace

std::size_t param_alignment(StateFormat format, ScalarType precision) {
  return in_blocks(format) ? kMomentBlock * size_of(precision) : kParamAlignment;
}

std::vector<std::size_t> state_payload_bytes(const ChunkSpec& chunk,
                                             const OptimizerStateOptions& options) {
  std::vector<std::size_t> bytes;
  for (const PayloadKind kind : state_kinds(chunk, options.format, options.moments)) {
    bytes.push_back(
        bytes_of(kind, chunk.used_bytes / size_of(chunk.type), chunk.type, options.format));
  }
  return bytes;
}

OptimizerState::OptimizerState(ChunkManager& manager, std::span<const at::Tensor> params,
                               Executor& executor, const OptimizerStateOptions& options,
                               StoredWeights* weights)
    : manager_(manager),
      layout_(manager.layout()),
      params_(params),
      executor_(executor),
      device_(options.device),
      weights_(weights),
      format_(options.format),
      streams_(params.size(), 0) {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    if (layout_.chunks()[i].trainable) {
      check_format(ChunkId{static_cast<std::uint32_t>(i)});
    }
    kinds_.push_back(state_kinds(layout_.chunks()[i], format_, options.moments));
  }
  choose_places(options);
  make_payloads();
}

void OptimizerState::check_format(ChunkId chunk) const {
  const ChunkSpec& spec = layout_.chunk(chunk);
  if (format_ != StateFormat::kFp32 && spec.type != ScalarType::kBFloat16) {
    throw InvalidArgument("optimizer state format " + std::string(to_string(format_)) +
                          " splits the fp32 master of bfloat16 parameters, and chunk " +
                          std::to_string(index(chunk)) + " holds " +
                          std::string(to_string(spec.type)) + "; use format fp32");
  }
  if (spec.used_bytes % param_alignment(format_, spec.type) != 0) {
    throw InvalidArgument(
        "chunk " + std::to_string(index(chunk)) + " of " + std::to_string(spec.used_bytes) +
        " bytes is not aligned to " + std::to_string(param_alignment(format_, spec.type)) +
        ", which optimizer state format " + std::string(to_string(format_)) + " needs");
  }
}

// The window on NVMe comes out of the host's room before the states that stay there.
void OptimizerState::choose_places(const OptimizerStateOptions& options) {
  std::vector<std::size_t> bytes(kinds_.size(), 0);
  std::vector<std::vector<PayloadSpec>> specs(kinds_.size());
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (manager_.placement(chunk) == Placement::kDevice) {
      continue;
    }
    for (const PayloadKind kind : kinds_[i]) {
      specs[i].push_back({std::string(to_string(kind)) + " of chunk " + std::to_string(i),
                          payload_bytes(chunk, kind)});
      bytes[i] += specs[i].back().bytes;
    }
  }
  stored_.resize(kinds_.size(), false);
  if (!options.nvme) {
    return;
  }
  MemoryTier& host = manager_.host();
  stored_ = choose_stored(bytes, host.ledger().available(),
                          NvmeTier::window_bytes(specs, WindowSlots{}.most), options.nvme_fraction);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (!stored_[i]) {
      specs[i].clear();
    }
  }
  if (std::find(stored_.begin(), stored_.end(), true) != stored_.end()) {
    NvmeOptions nvme = *options.nvme;
    nvme.budget_bytes -= weights_ != nullptr ? weights_->tier().used_bytes() : 0;
    nvme_ = std::make_unique<NvmeTier>(nvme, specs, host, executor_);
  }
}

void OptimizerState::make_payloads() {
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    for (const PayloadKind kind : kinds_[i]) {
      if (!stored_[i]) {
        manager_.add_payload(chunk, kind, payload_bytes(chunk, kind));
      }
    }
  }
}

std::size_t OptimizerState::payload_bytes(ChunkId chunk, PayloadKind kind) const {
  const ChunkSpec& spec = layout_.chunk(chunk);
  return payload_bytes(chunk, kind, spec.used_bytes / size_of(spec.type));
}

// Of the first `numel` elements of a chunk.
std::size_t OptimizerState::payload_bytes(ChunkId chunk, PayloadKind kind,
                                          std::size_t numel) const {
  return bytes_of(kind, numel, layout_.chunk(chunk).type, format_);
}

std::vector<std::pair<PayloadKind, std::size_t>> OptimizerState::stored_payloads(
    ChunkId chunk) const {
  std::vector<std::pair<PayloadKind, std::size_t>> found;
  if (stored(chunk)) {
    for (const PayloadKind kind : kinds_[index(chunk)]) {
      found.emplace_back(kind, payload_bytes(chunk, kind));
    }
  }
  return found;
}

bool OptimizerState::has(ParamId param, PayloadKind kind) const {
  const auto& kinds = kinds_[index(layout_.place(param).chunk)];
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

std::byte* OptimizerState::element(ParamId param, PayloadKind kind) const {
  const ParamPlace place = layout_.place(param);
  const auto& payload = manager_.payload(place.chunk, kind);
  return payload && payload->data() != nullptr
             ? payload->data() + payload_bytes(place.chunk, kind, place.offset)
             : nullptr;
}

std::byte* OptimizerState::element(const Memory& memory, ParamId param, PayloadKind kind) const {
  const ParamPlace place = layout_.place(param);
  std::byte* const payload = memory[static_cast<std::size_t>(kind)];
  return payload != nullptr ? payload + payload_bytes(place.chunk, kind, place.offset) : nullptr;
}

OptimizerState::Memory OptimizerState::resident(ChunkId chunk) const {
  Memory memory{};
  for (const PayloadKind kind : kinds_[index(chunk)]) {
    memory[static_cast<std::size_t>(kind)] = manager_.payload(chunk, kind)->data();
  }
  return memory;
}

void OptimizerState::with_memory(ChunkId chunk, StreamAccess access,
                                 const std::function<void(const Memory&)>& work) const {
  if (on_device(chunk)) {
    with_copies(chunk, access, work);
    return;
  }
  if (!stored(chunk)) {
    work(resident(chunk));
    return;
  }
  nvme_->stream().use(index(chunk), access, [&](std::span<const std::span<std::byte>> payloads) {
    Memory memory{};
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      memory[static_cast<std::size_t>(kinds_[index(chunk)][i])] = payloads[i].data();
    }
    work(memory);
  });
}

bool OptimizerState::stored_in_part(ChunkId chunk) const {
  return stored(chunk) || manager_.stored(chunk);
}

// Parameters and gradients that are not on NVMe.
OptimizerState::Memory OptimizerState::with_weights(ChunkId chunk, Memory memory) const {
  for (const PayloadKind kind : {PayloadKind::kParam, PayloadKind::kGrad}) {
    memory[static_cast<std::size_t>(kind)] = manager_.payload(chunk, kind)->data();
  }
  return memory;
}

void OptimizerState::with_all_memory(ChunkId chunk,
                                     const std::function<void(const Memory&)>& work) const {
  if (!manager_.stored(chunk)) {
    with_memory(chunk, StreamAccess::kUpdate,
                [&](const Memory& states) { work(with_weights(chunk, states)); });
    return;
  }
  // Weights before states: what is written back from the device holds its weights and needs states.
  StoredWeights::Holds holds = weights_->hold_for_update(chunk);
  with_memory(chunk, StreamAccess::kUpdate, [&](const Memory& states) {
    Memory memory = states;
    memory[static_cast<std::size_t>(PayloadKind::kParam)] = holds[0].payloads().front().data();
    memory[static_cast<std::size_t>(PayloadKind::kGrad)] = holds[1].payloads().front().data();
    work(memory);
  });
  holds[0].release();  // may throw
}

void OptimizerState::with_home(ParamId param, const std::function<void(std::byte*)>& work) const {
  const ParamPlace place = layout_.place(param);
  if (on_device(place.chunk)) {
    std::vector<std::byte> copy(layout_.param(param).numel * size_of(layout_.param(param).type));
    work(copy.data());  // which writes all of it
    copy_to_device(copy, element(param, PayloadKind::kParam));
    return;
  }
  if (!manager_.stored(place.chunk)) {
    host_writes_home(place.chunk);
    work(element(param, PayloadKind::kParam));
    return;
  }
  const std::unique_ptr<HomeHold> hold = weights_->hold(place.chunk);
  hold->wait(HomeAccess::kWrite);
  work(hold->data() + payload_bytes(place.chunk, PayloadKind::kParam, place.offset));
}

void OptimizerState::set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams) {
  if (streams.size() != params_.size()) {
    throw InvalidArgument("there are " + std::to_string(streams.size()) + " rounding streams for " +
                          std::to_string(params_.size()) + " parameters");
  }
  seed_ = seed;
  streams_ = std::move(streams);
}

ParamUpdate OptimizerState::update_of(ParamId param, const AdamOptions& options, std::int64_t step,
                                      double grad_scale) const {
  return {.param = param,
          .coefficients = AdamCoefficients(options, step, grad_scale),
          .rounding = RoundingKey(seed_, streams_[index(param)], step)};
}

AdamSegment OptimizerState::segment(const ParamUpdate& update, const Memory& memory) const {
  const ParamId param = update.param;
  const ParamSpec& spec = layout_.param(param);
  AdamSegment segment{.exp_avg = element(memory, param, PayloadKind::kExpAvg),
                      .exp_avg_sq = element(memory, param, PayloadKind::kExpAvgSq),
                      .grad = element(memory, param, PayloadKind::kGrad),
                      .type = spec.type,
                      .numel = spec.numel,
                      .coefficients = update.coefficients,
                      .format = format_,
                      .remainder = data<std::int16_t>(memory, param, PayloadKind::kRemainder),
                      .scales = data<MomentScales>(memory, param, PayloadKind::kMomentScales),
                      .rounding = update.rounding};
  if (spec.type == ScalarType::kFloat32) {
    segment.master = data<float>(memory, param, PayloadKind::kParam);
  } else {
    segment.master = data<float>(memory, param, PayloadKind::kMaster);
    segment.param = element(memory, param, PayloadKind::kParam);
  }
  return segment;
}

void OptimizerState::add_segments(std::span<const ParamUpdate> updates, const Memory& memory,
                                  std::vector<AdamSegment>& segments) const {
  for (const ParamUpdate& update : updates) {
    segments.push_back(segment(update, memory));
  }
}

void OptimizerState::update(ChunkId chunk, std::span<const ParamUpdate> updates) {
  if (on_device(chunk)) {
    std::vector<AdamSegment> segments;
    add_segments(updates, in_place(chunk), segments);
    update_on_device(segments);
    return;
  }
  host_writes_home(chunk);
  with_all_memory(chunk, [&](const Memory& memory) {
    std::vector<AdamSegment> segments;
    add_segments(updates, memory, segments);
    adam_update(executor_, segments);
  });
}

// Chunks in memory wait until there is one to be read, and are updated together meanwhile.
void OptimizerState::update_all(std::span<const std::vector<ParamUpdate>> updates,
                                std::size_t& num_begun) {
  std::vector<ChunkId> on_nvme;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    if (!updates[i].empty() && stored_in_part(ChunkId{static_cast<std::uint32_t>(i)})) {
      on_nvme.push_back(ChunkId{static_cast<std::uint32_t>(i)});
    }
  }
  std::vector<AdamSegment> in_memory;
  std::vector<AdamSegment> on_device_itself;
  std::size_t num_in_memory = 0;
  const auto update_in_memory = [&] {
    num_begun += std::exchange(num_in_memory, 0);
    update_on_device(on_device_itself);  // first: it goes on while the host is busy
    adam_update(executor_, in_memory);
    on_device_itself.clear();
    in_memory.clear();
  };
  announce(on_nvme);
  std::size_t next = 0;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (updates[i].empty()) {
      continue;
    }
    if (on_device(chunk)) {
      add_segments(updates[i], in_place(chunk), on_device_itself);
      ++num_in_memory;
      continue;
    }
    host_writes_home(chunk);
    if (!stored_in_part(chunk)) {
      with_all_memory(chunk, [&](const Memory& memory) {  // which stays where it is
        add_segments(updates[i], memory, in_memory);
      });
      ++num_in_memory;
      continue;
    }
    announce(std::span(on_nvme).subspan(next++));
    update_in_memory();
    with_all_memory(chunk, [&](const Memory& memory) {
      ++num_begun;
      add_segments(updates[i], memory, in_memory);
      adam_update(executor_, in_memory);
      in_memory.clear();
    });
  }
  update_in_memory();
  flush();
}

void OptimizerState::announce(std::span<const ChunkId> chunks) {
  if (weights_ != nullptr) {
    weights_->announce_updates(chunks);
  }
  if (!nvme_) {
    return;
  }
  std::size_t room = nvme_->stream().max_ahead() + 1;  // with the one that is used next
  for (const ChunkId chunk : chunks) {
    if (room == 0) {
      return;
    }
    if (stored(chunk)) {
      nvme_->stream().prefetch(index(chunk));
      --room;
    }
  }
}

void OptimizerState::flush() {
  if (nvme_) {
    nvme_->stream().flush();
  }
}

void OptimizerState::discard_stored() {
  if (nvme_) {
    nvme_->stream().discard_all();
  }
}

}  // namespace castor
