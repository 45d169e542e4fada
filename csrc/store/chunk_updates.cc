#include "store/chunk_updates.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "optim/rule_of_type.h"

namespace castor {
namespace {

/// Calls `update(rule, segments)` for the rule of each type of parameters among the segments, which
/// it orders by it.
template <typename Update>
void for_each_rule(const UpdateRule& rule, std::span<UpdateSegment> segments,
                   const Update& update) {
  const auto is_split = [&rule](const UpdateSegment& segment) {
    return &rule_of_type(rule, segment.type) == &rule;
  };
  const auto unsplit = std::stable_partition(segments.begin(), segments.end(), is_split);
  for (const auto of_rule :
       {std::span(segments.begin(), unsplit), std::span(unsplit, segments.end())}) {
    if (!of_rule.empty()) {
      update(rule_of_type(rule, of_rule.front().type), std::span<const UpdateSegment>(of_rule));
    }
  }
}

}  // namespace

ChunkUpdates::ChunkUpdates(const ChunkLayout& layout, const ShardMap& shards, StateStore& places,
                           Executor& executor, std::shared_ptr<const UpdateRule> rule,
                           ChunkReads& reads, RankWeights* ranks, DeviceUpdates* on_device)
    : layout_(layout),
      shards_(shards),
      places_(places),
      executor_(executor),
      rule_(std::move(rule)),
      reads_(reads),
      ranks_(ranks),
      on_device_(on_device),
      streams_(layout.params().size(), 0) {}

const UpdateRule& ChunkUpdates::rule() const {
  if (rule_ == nullptr) {
    throw UsageError("another optimizer than castor's updates the parameters of this model");
  }
  return *rule_;
}

void ChunkUpdates::set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams) {
  if (streams.size() != streams_.size()) {
    throw InvalidArgument("there are " + std::to_string(streams.size()) + " rounding streams for " +
                          std::to_string(streams_.size()) + " parameters");
  }
  seed_ = seed;
  streams_ = std::move(streams);
}

ParamUpdate ChunkUpdates::update_of(ParamId param, const RuleOptions& options, std::int64_t step,
                                    double grad_scale) const {
  return {.param = param,
          .coefficients = rule_->coefficients(options, step, grad_scale),
          .rounding = RoundingKey(seed_, streams_[index(param)], step),
          .steps_states = rule_->steps_states(options)};
}

void ChunkUpdates::add_segments(std::span<const ParamUpdate> updates, const ChunkMemory& memory,
                                std::vector<UpdateSegment>& segments) const {
  for (const ParamUpdate& update : updates) {
    const Piece piece = shards_.piece(update.param);
    if (piece.numel == 0) {
      continue;
    }
    const auto at = [&]<typename T = std::byte>(PayloadKind kind) {
      return reinterpret_cast<T*>(places_.element(memory, update.param, kind, piece.first_element));
    };
    UpdateSegment& segment = segments.emplace_back(
        UpdateSegment{.param = at(PayloadKind::kParam),
                      .grad = at(PayloadKind::kGrad),
                      .master = at.operator()<float>(kMasterPayload),
                      .remainder = at.operator()<std::int16_t>(kRemainderPayload),
                      .type = layout_.param(update.param).type,
                      .numel = piece.numel,
                      .first_element = piece.first_element,
                      .coefficients = update.coefficients,
                      .rounding = update.rounding});
    for (std::size_t i = 0; i < rule_->states().size(); ++i) {
      segment.states[i] = at(rule_payload(i));
    }
  }
}

void ChunkUpdates::begin(ChunkId chunk) {
  places_.begin_update(chunk);
  if (ranks_ != nullptr && !places_.sharded(chunk) && places_.weights(chunk).has_copy()) {
    reads_.wait(chunk);
    places_.await_host_storage_reads(chunk);
    ranks_->publish_copy(places_.weights(chunk));
  }
}

void ChunkUpdates::run_on_host(std::span<UpdateSegment> segments) const {
  for_each_rule(*rule_, segments, [this](const UpdateRule& rule, auto of_rule) {
    if (on_device_ != nullptr) {
      on_device_->update(rule, executor_, of_rule);
    } else {
      rule.update(executor_, of_rule);
    }
  });
}

void ChunkUpdates::run_on_device(std::span<UpdateSegment> segments) const {
  for_each_rule(*rule_, segments, [this](const UpdateRule& rule, auto of_rule) {
    places_.device().kernels().update(rule, of_rule, places_.device().stream()->id());
  });
}

void ChunkUpdates::run(ChunkId chunk, std::span<const ParamUpdate> updates) {
  reads_.wait(chunk);
  std::vector<UpdateSegment> segments;
  if (places_.on_device(chunk)) {
    add_segments(updates, places_.in_place(chunk), segments);
    run_on_device(segments);
    return;
  }
  places_.await_host_storage_reads(chunk);
  places_.with_all(chunk, [&](const ChunkMemory& memory) {
    add_segments(updates, to_update(chunk, memory), segments);
    run_on_host(segments);
  });
  gather_shards(std::span(&chunk, 1));
}

ChunkMemory ChunkUpdates::to_update(ChunkId chunk, ChunkMemory memory) const {
  if (ranks_ != nullptr && !places_.sharded(chunk)) {
    memory[static_cast<std::size_t>(PayloadKind::kParam)] =
        ranks_->begin_update(places_.weights(chunk));
  }
  return memory;
}

void ChunkUpdates::gather_shards(std::span<const ChunkId> chunks) {
  if (ranks_ == nullptr) {
    return;
  }
  std::vector<const Payload*> weights;
  for (const ChunkId chunk : chunks) {
    if (places_.sharded(chunk)) {
      places_.end_update(chunk);
    } else {
      weights.push_back(&places_.weights(chunk));
    }
  }
  ranks_->gather(weights);
}

// Chunks in memory wait until there is one to be read, and are updated together meanwhile.
void ChunkUpdates::run_all(std::span<const std::vector<ParamUpdate>> updates,
                           std::size_t& num_begun) {
  std::vector<ChunkId> updated;
  std::vector<ChunkId> on_nvme;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (updates[i].empty()) {
      continue;
    }
    updated.push_back(chunk);
    if (places_.partly_stored(chunk)) {
      on_nvme.push_back(chunk);
    }
  }
  std::vector<UpdateSegment> in_memory;
  std::vector<UpdateSegment> on_device;
  std::size_t num_in_memory = 0;
  const auto update_in_memory = [&] {
    num_begun += std::exchange(num_in_memory, 0);
    run_on_device(on_device);  // first: it goes on while the host is busy
    run_on_host(in_memory);
    on_device.clear();
    in_memory.clear();
  };
  places_.announce(on_nvme);
  std::size_t next = 0;
  for (const ChunkId chunk : updated) {
    const std::vector<ParamUpdate>& of_chunk = updates[index(chunk)];
    if (!reads_.let_go(chunk)) {
      update_in_memory();  // meanwhile
      reads_.wait(chunk);
    }
    if (places_.on_device(chunk)) {
      add_segments(of_chunk, places_.in_place(chunk), on_device);
      ++num_in_memory;
      continue;
    }
    places_.await_host_storage_reads(chunk);
    if (!places_.partly_stored(chunk)) {
      add_segments(of_chunk, to_update(chunk, places_.in_place(chunk)), in_memory);
      ++num_in_memory;
      continue;
    }
    places_.announce(std::span(on_nvme).subspan(next++));
    update_in_memory();
    places_.with_all(chunk, [&](const ChunkMemory& memory) {
      ++num_begun;
      add_segments(of_chunk, to_update(chunk, memory), in_memory);
      run_on_host(in_memory);
      in_memory.clear();
    });
  }
  update_in_memory();
  gather_shards(updated);
  places_.flush();
}

}  // namespace castor
