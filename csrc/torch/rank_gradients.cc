#include "torch/rank_gradients.h"

#include <algorithm>
#include <span>

#include "core/scalar_type.h"
#include "core/units.h"
#include "optim/average.h"
#include "torch/gil.h"

namespace castor {
namespace {

/// Of a gradient, at most so much is on its way at once.
constexpr std::size_t kWindowBytes = std::size_t{8} << 20;

// Parts of it are whole elements, and begin where a cache line does.
std::size_t window_bytes(const ChunkLayout& layout, std::size_t ranks) {
  std::size_t largest = 1;
  for (const ChunkSpec& chunk : layout.chunks()) {
    largest = std::max(largest, chunk.trainable ? chunk.used_bytes : 1);
  }
  return align_up(std::min(largest, kWindowBytes), ranks * kParamAlignment);
}

}  // namespace

RankGradients::RankGradients(Collectives& ranks, RankMeeting& meeting, const ChunkLayout& layout,
                             GradientSink& gradients, Executor& executor, MemoryTier& host)
    : ranks_(ranks),
      meeting_(meeting),
      layout_(layout),
      gradients_(gradients),
      executor_(executor),
      window_(host.allocate(window_bytes(layout, ranks_.size()),
                            "gradients pass through it from rank to rank; raise host_memory")) {}

void RankGradients::end_backward(TensorGate& gate) {
  if (synchronised_) {
    average(MeetingPoint::kBackwardEnd, gate);
  }
}

void RankGradients::average(MeetingPoint point, TensorGate& gate) {
  const GilRelease released;
  const RankFigures::Timed timed(figures_);
  const GradientMarks all = meeting_.meet(point, gradients_.marks());
  for (std::size_t i = 0; i < all.fresh.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (!all.fresh[i]) {
      continue;
    }
    gate.pass(gradients_.group(chunk));  // the last update has read them, and copies have arrived
    for (const ParamId param : layout_.chunk(chunk).params) {
      if (all.present[index(param)]) {
        gradients_.make_present(param, all.scale.value_or(1.0));
      }
    }
    gradients_.average(chunk, [&](std::span<std::byte> gradients) {
      average(gradients, layout_.chunk(chunk).type);
    });
  }
}

void RankGradients::average(std::span<std::byte> gradients, ScalarType type) {
  for (std::size_t begin = 0; begin < gradients.size(); begin += window_.bytes()) {
    const auto piece =
        gradients.subspan(begin, std::min(window_.bytes(), gradients.size() - begin));
    const std::span parts(window_.data(), piece.size());
    ranks_.all_to_all(piece, parts);
    const auto own = parts.first(piece.size() / ranks_.size());
    castor::average(&executor_, own.data(), parts.data(), ranks_.size(), own.size() / size_of(type),
                    type);
    ranks_.all_gather(own, piece);
    figures_.add_bytes(2 * (ranks_.size() - 1) * own.size());
  }
}

}  // namespace castor
