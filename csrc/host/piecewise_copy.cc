#include "host/piecewise_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace castor {

void PiecewiseCopy::add(std::span<const std::byte> source, std::byte* target) {
  for (std::size_t at = 0; at < source.size(); at += kPieceBytes) {
    pieces_.push_back({.source = source.subspan(at, std::min(kPieceBytes, source.size() - at)),
                       .target = target + at});
  }
}

bool PiecewiseCopy::copy_next() noexcept {
  const std::size_t piece = num_begun_.fetch_add(1, std::memory_order_relaxed);
  if (piece >= pieces_.size()) {
    return false;
  }
  copy_past_caches(pieces_[piece].source, pieces_[piece].target);
  if (num_copied_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces_.size()) {
    num_copied_.notify_all();
  }
  return true;
}

void PiecewiseCopy::finish(Executor* executor) {
  const auto copy_all = [this](std::size_t /*thread*/) {
    while (copy_next()) {
    }
  };
  if (executor != nullptr && num_copied_ < pieces_.size()) {
    executor->parallel_for(std::min(executor->num_threads(), pieces_.size()), copy_all);
  } else {
    copy_all(0);
  }
  // Others may be in the middle of a piece.
  std::size_t copied = 0;
  while ((copied = num_copied_.load(std::memory_order_acquire)) < pieces_.size()) {
    num_copied_.wait(copied, std::memory_order_acquire);
  }
}

void copy_past_caches(std::span<const std::byte> source, std::byte* target) noexcept {
  const std::byte* from = source.data();
  std::size_t left = source.size();
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  for (; left >= kLine; left -= kLine, from += kLine, target += kLine) {
    const auto* const in = reinterpret_cast<const __m128i*>(from);
    auto* const out = reinterpret_cast<__m128i*>(target);
    const __m128i first = _mm_loadu_si128(in);
    const __m128i second = _mm_loadu_si128(in + 1);
    const __m128i third = _mm_loadu_si128(in + 2);
    const __m128i fourth = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, first);
    _mm_stream_si128(out + 1, second);
    _mm_stream_si128(out + 2, third);
    _mm_stream_si128(out + 3, fourth);
  }
  _mm_sfence();  // before anybody is told of them
#endif
  std::memcpy(target, from, left);
}

}  // namespace castor
