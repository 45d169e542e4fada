#include "store/gradient_norms.h"

#include <algorithm>

#include "optim/gradient.h"
#include "store/chunk_pins.h"

namespace castor {
namespace {

/// From this size on a gradient's norm is worth several threads.
constexpr std::size_t kParallelNumel = std::size_t{1} << 18;

std::vector<ChunkId> all_chunks(const ChunkLayout& layout) {
  std::vector<ChunkId> chunks;
  for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
    chunks.push_back(ChunkId{static_cast<std::uint32_t>(i)});
  }
  return chunks;
}

}  // namespace

std::vector<double> GradientNorms::squares(Runtime& runtime, const Present& present,
                                           const Measure& measure_shards) const {
  const ChunkPins pins(runtime, device_, all_chunks(layout_));
  std::vector<double> squares(layout_.params().size(), 0.0);
  measure_on_device(present, squares);
  measure_on_host(present, squares);
  if (weights_ != nullptr) {
    measure_stored(present, squares);
  }
  if (shards_ != nullptr) {
    measure_shards(squares);
  }
  return squares;
}

double GradientNorms::square(ParamId param, const std::byte* data, Executor* executor) const {
  const ParamSpec& spec = layout_.param(param);
  const std::size_t offset = layout_.place(param).offset * size_of(spec.type);
  return copy_and_square_norm(executor, nullptr, data + offset, spec.numel, spec.type);
}

bool GradientNorms::in_host_memory(ChunkId chunk) const {
  return !manager_.gradients_stored(chunk) && !(shards_ != nullptr && shards_->sharded(chunk)) &&
         !device_.holds(manager_, chunk);
}

void GradientNorms::measure_on_host(const Present& present, std::span<double> squares) const {
  const auto measure = [&](ChunkId chunk, bool large, Executor* executor) {
    if (!layout_.chunk(chunk).trainable || !in_host_memory(chunk)) {
      return;
    }
    const std::byte* const data = manager_.payload(chunk, PayloadKind::kGrad)->data();
    for (const ParamId param : layout_.chunk(chunk).params) {
      if (present(param) && (layout_.param(param).numel >= kParallelNumel) == large) {
        squares[index(param)] = square(param, data, executor);
      }
    }
  };
  const std::vector<ChunkId> chunks = all_chunks(layout_);
  for (const ChunkId chunk : chunks) {
    measure(chunk, /*large=*/true, &executor_);
  }
  executor_.parallel_for(chunks.size(),
                         [&](std::size_t i) { measure(chunks[i], /*large=*/false, nullptr); });
}

void GradientNorms::measure_on_device(const Present& present, std::span<double> squares) const {
  std::vector<NormSegment> segments;
  std::vector<ParamId> params;
  for (const ChunkId chunk : all_chunks(layout_)) {
    if (!layout_.chunk(chunk).trainable || !device_.holds(manager_, chunk)) {
      continue;
    }
    for (const ParamId param : layout_.chunk(chunk).params) {
      if (present(param)) {
        const ParamSpec& spec = layout_.param(param);
        segments.push_back({.data = manager_.payload(chunk, PayloadKind::kGrad)->data() +
                                    layout_.place(param).offset * size_of(spec.type),
                            .numel = spec.numel,
                            .type = spec.type});
        params.push_back(param);
      }
    }
  }
  if (segments.empty()) {
    return;
  }
  std::vector<double> sums(segments.size());
  device_.kernels().square_norms(segments, sums, device_.stream()->id());
  for (std::size_t i = 0; i < params.size(); ++i) {
    squares[index(params[i])] += sums[i];
  }
}

void GradientNorms::measure_stored(const Present& present, std::span<double> squares) const {
  std::vector<ChunkId> chunks = all_chunks(layout_);
  std::erase_if(chunks, [&](ChunkId chunk) {
    const auto& params = layout_.chunk(chunk).params;
    return !manager_.gradients_stored(chunk) || std::none_of(params.begin(), params.end(), present);
  });
  weights_->read_gradients(chunks, [&](ChunkId chunk, const std::byte* data) {
    for (const ParamId param : layout_.chunk(chunk).params) {
      if (present(param)) {
        squares[index(param)] = square(
            param, data, layout_.param(param).numel >= kParallelNumel ? &executor_ : nullptr);
      }
    }
  });
}

}  // namespace castor
