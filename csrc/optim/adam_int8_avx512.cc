#include "optim/adam_int8_avx512.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "optim/block_moments.h"
#include "optim/dispatch.h"
#include "optim/pairs.h"
#include "optim/rounding.h"
#include "optim/stochastic.h"

// What follows is compiled for AVX-512 (dispatch.h and isa.cc name the same features),
// adam_element.h included, which finds its Floats overloads only where they stand before it. Every
// function of this region is always_inline or has no other caller, and whatever adam_element.h
// includes is included above: no other file can be linked to AVX-512 code from here.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace castor::detail {

using Floats = float __attribute__((vector_size(64)));              // 16
using Bits = std::uint32_t __attribute__((vector_size(64)));        // of 16 Floats
using Words = std::uint16_t __attribute__((vector_size(64)));       // 32 elements of 16 bits
using SignedWords = std::int16_t __attribute__((vector_size(64)));  // the same
using Codes = std::uint8_t __attribute__((vector_size(32)));        // of 32 moments

// GCC 12 takes some intrinsics without a mask for uses of uninitialised variables.
constexpr __mmask16 kAllLanes = 0xffff;
constexpr __mmask32 kAllWords = 0xffffffff;

[[gnu::always_inline]] inline Floats square_root(Floats x) noexcept {
  return _mm512_maskz_sqrt_ps(kAllLanes, x);
}

[[gnu::always_inline]] inline Floats blend(bool condition, Floats a, Floats b) noexcept {
  return condition ? a : b;
}

}  // namespace castor::detail

#include "optim/adam_element.h"

namespace castor::detail {
namespace {

constexpr std::size_t kStride = 32;  // elements of one Words, which the loops take at a time
constexpr std::uint32_t kLanes = 16;
constexpr std::size_t kCacheLine = 64;

template <typename Vector>
[[gnu::always_inline]] inline Vector load(const void* from) noexcept {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

[[gnu::always_inline]] inline void prefetch(const void* at) noexcept {
  _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
}

template <typename Vector>
[[gnu::always_inline]] inline void store(void* to, Vector vector) noexcept {
  std::memcpy(to, &vector, sizeof vector);
}

[[gnu::always_inline]] inline Bits bits_of(Floats x) noexcept { return reinterpret_cast<Bits>(x); }

[[gnu::always_inline]] inline Floats floats_of(Bits x) noexcept {
  return reinterpret_cast<Floats>(x);
}

[[gnu::always_inline]] inline Bits larger(Bits a, Bits b) noexcept { return a > b ? a : b; }

[[gnu::always_inline]] inline std::uint32_t largest_of(Bits x) noexcept {
  std::uint32_t largest = 0;
  for (std::uint32_t lane = 0; lane < kLanes; ++lane)
    largest = std::max(largest, x[lane]);
  return largest;
}

[[gnu::always_inline]] inline std::uint16_t upper_half(float x) noexcept {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
}

// Words become a Pair by unpacking within each 128 bits, which takes one instruction a half:
// `first` holds elements 0-3, 8-11, 16-19 and 24-27, `second` the others. Nothing but the random
// numbers depends on that order until pack() undoes it.

[[gnu::always_inline]] inline Pair<Bits> unpack(Words lower, Words upper) noexcept {
  const auto low = reinterpret_cast<__m512i>(lower);
  const auto high = reinterpret_cast<__m512i>(upper);
  return {reinterpret_cast<Bits>(_mm512_unpacklo_epi16(low, high)),
          reinterpret_cast<Bits>(_mm512_unpackhi_epi16(low, high))};
}

/// The element in a lane of `first`; that of `second` is 4 further.
[[nodiscard]] constexpr std::uint32_t element_in(std::uint32_t lane) noexcept {
  return lane / 4 * 8 + lane % 4;
}

using Order = std::array<std::uint16_t, kStride>;

/// Which of the 64 half lanes of a Pair each element comes from: the lower or upper half of one.
[[nodiscard]] constexpr Order pack_order(bool upper) noexcept {
  Order order{};
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
    order[element_in(lane)] = static_cast<std::uint16_t>(2 * lane + upper);
    order[element_in(lane) + 4] = static_cast<std::uint16_t>(2 * (kLanes + lane) + upper);
  }
  return order;
}

alignas(64) constexpr Order kUpperHalves = pack_order(true);
alignas(64) constexpr Order kLowerHalves = pack_order(false);

[[gnu::always_inline]] inline Words pack(Pair<Bits> of, const Order& order) noexcept {
  return reinterpret_cast<Words>(_mm512_permutex2var_epi16(reinterpret_cast<__m512i>(of.first),
                                                           load<__m512i>(order.data()),
                                                           reinterpret_cast<__m512i>(of.second)));
}

/// from_bfloat16.
[[gnu::always_inline]] inline Pair<Floats> widen(Words upper) noexcept {
  const Pair<Bits> bits = unpack(Words{}, upper);
  return {floats_of(bits.first), floats_of(bits.second)};
}

/// join_master. Pairs that no master makes are among those whose sum is not finite, which are rare.
[[gnu::always_inline]] inline Pair<Floats> join_masters(Words params, Words remainders) noexcept {
  Words upper = params + reinterpret_cast<Words>(reinterpret_cast<SignedWords>(remainders) >> 15);
  const __mmask32 finite =
      _mm512_cmplt_epu16_mask(reinterpret_cast<__m512i>(upper & 0x7fff), _mm512_set1_epi16(0x7f80));
  if (finite != kAllWords) [[unlikely]] {
    upper = reinterpret_cast<Words>(_mm512_mask_mov_epi16(reinterpret_cast<__m512i>(params), finite,
                                                          reinterpret_cast<__m512i>(upper)));
    remainders = reinterpret_cast<Words>(
        _mm512_maskz_mov_epi16(finite, reinterpret_cast<__m512i>(remainders)));
  }
  const Pair<Bits> masters = unpack(remainders, upper);
  return {floats_of(masters.first), floats_of(masters.second)};
}

// The maps of block_moments.h. A code begins 3 bits up in the upper half of its fp32 number: where
// they can, both directions take 16 bits an element.

constexpr unsigned kWordShift = kCodeShift - 16;
constexpr std::uint32_t kSign = 0x80000000u;

[[gnu::always_inline]] inline Floats without_knee(Floats x, float knee) noexcept {
  const Floats magnitude = floats_of(bits_of(x) & ~kSign) - knee;
  return floats_of(bits_of(magnitude) | (bits_of(x) & kSign));
}

[[gnu::always_inline]] inline Pair<Floats> decode_exp_avgs(const std::uint8_t* codes,
                                                           float knee) noexcept {
  const __m512i extended = _mm512_maskz_cvtepi8_epi16(kAllWords, load<__m256i>(codes));
  const Words steps =
      (reinterpret_cast<Words>(extended) << kWordShift) & (0x8000 | 0x7f << kWordShift);
  const Pair<Floats> sums = widen(steps + upper_half(knee));
  return {without_knee(sums.first, knee), without_knee(sums.second, knee)};
}

[[gnu::always_inline]] inline Pair<Floats> decode_exp_avg_sqs(const std::uint8_t* codes,
                                                              float knee) noexcept {
  const __m512i extended = _mm512_maskz_cvtepu8_epi16(kAllWords, load<__m256i>(codes));
  const Pair<Floats> sums =
      widen((reinterpret_cast<Words>(extended) << kWordShift) + upper_half(knee));
  const float zero = knee - floor_of(knee);
  return {sums.first - zero, sums.second - zero};
}

[[gnu::always_inline]] inline Bits with_knee(Floats x, float knee, Bits random) noexcept {
  const Bits signed_knee = std::bit_cast<std::uint32_t>(knee) | (bits_of(x) & kSign);
  return bits_of(x + floats_of(signed_knee)) + random;
}

[[gnu::always_inline]] inline void encode_exp_avgs(std::uint8_t* codes, Pair<Floats> values,
                                                   float knee, Pair<Bits> random) noexcept {
  const Pair<Bits> sums{with_knee(values.first, knee, random.first),
                        with_knee(values.second, knee, random.second)};
  const Words words = pack(sums, kUpperHalves) - upper_half(knee);
  // Bit 7 of one, the others of the other; the upper bytes are dropped.
  constexpr int kSelectByThird = 0xd8;
  const Words sign = Words{} + 0x80;
  const __m512i bytes = _mm512_ternarylogic_epi32(reinterpret_cast<__m512i>(words >> kWordShift),
                                                  reinterpret_cast<__m512i>(words >> 8),
                                                  reinterpret_cast<__m512i>(sign), kSelectByThird);
  store(codes, __builtin_convertvector(reinterpret_cast<Words>(bytes), Codes));
}

/// A sum below the knee counts as the knee: the subtraction stops at zero.
[[gnu::always_inline]] inline void encode_exp_avg_sqs(std::uint8_t* codes, Pair<Floats> values,
                                                      float knee, Pair<Bits> random) noexcept {
  const float zero = knee - floor_of(knee);
  const Pair<Bits> sums{bits_of(values.first + zero) + random.first,
                        bits_of(values.second + zero) + random.second};
  const Words knees = Words{} + upper_half(knee);
  const __m512i words = _mm512_subs_epu16(reinterpret_cast<__m512i>(pack(sums, kUpperHalves)),
                                          reinterpret_cast<__m512i>(knees));
  store(codes, __builtin_convertvector(reinterpret_cast<Words>(words) >> kWordShift, Codes));
}

/// Random numbers for a block, kStride elements after kStride.
class RandomLanes {
 public:
  [[gnu::always_inline]] inline explicit RandomLanes(RoundingSequence sequence) noexcept {
    Bits elements{};
    for (std::uint32_t lane = 0; lane < kLanes; ++lane)
      elements[lane] = element_in(lane);
    next_ = {sequence.start + sequence.step * elements,
             sequence.start + sequence.step * (elements + 4)};
    step_ = Bits{} + sequence.step * static_cast<std::uint32_t>(kStride);
  }

  [[gnu::always_inline]] inline Pair<Bits> next() noexcept {
    constexpr unsigned kUnused = 32 - kCodeShift;
    const Pair<Bits> random{next_.first >> kUnused, next_.second >> kUnused};
    next_ = {next_.first + step_, next_.second + step_};
    return random;
  }

 private:
  Pair<Bits> next_;
  Bits step_;
};

/// New moments of a block that wait to be encoded, in the order of unpack().
struct WaitingMoments {
  alignas(64) float exp_avg[kMomentBlock];
  alignas(64) float exp_avg_sq[kMomentBlock];
};

/// Decodes and updates the block that begins at element `from`, kStride elements at a time.
/// Prefetches the next block meanwhile, past the arrays' ends too, where that does nothing: saves
/// 5% of the time from memory.
template <WeightDecayMode mode>
class BlockUpdate {
 public:
  [[gnu::always_inline]] inline BlockUpdate(const AdamSegment& segment, std::size_t from,
                                            WaitingMoments& moments) noexcept
      : param_(static_cast<std::uint16_t*>(segment.param) + from),
        remainder_(segment.remainder + from),
        grad_(static_cast<const std::uint16_t*>(segment.grad) + from),
        exp_avg_(static_cast<const std::uint8_t*>(segment.exp_avg) + from),
        exp_avg_sq_(static_cast<const std::uint8_t*>(segment.exp_avg_sq) + from),
        scales_(segment.scales[from / kMomentBlock]),
        coefficients_(segment.coefficients),
        moments_(moments) {
    for (std::size_t i = kMomentBlock; i < 2 * kMomentBlock; i += kCacheLine) {
      prefetch(exp_avg_ + i);
      prefetch(exp_avg_sq_ + i);
    }
  }

  /// The first half of the update, up to the moments.
  [[gnu::always_inline]] inline Pair<AdamElementOf<Floats>> update_moments(std::size_t i) noexcept {
    prefetch(param_ + i + kMomentBlock);
    prefetch(remainder_ + i + kMomentBlock);
    prefetch(grad_ + i + kMomentBlock);
    const Pair<Floats> w = join_masters(load<Words>(param_ + i), load<Words>(remainder_ + i));
    const Pair<Floats> g = widen(load<Words>(grad_ + i));
    const Pair<Floats> m = decode_exp_avgs(exp_avg_ + i, scales_.exp_avg);
    const Pair<Floats> v = decode_exp_avg_sqs(exp_avg_sq_ + i, scales_.exp_avg_sq);
    const AdamElementOf<Floats> first =
        adam_moments<mode>({w.first, m.first, v.first}, g.first, coefficients_);
    const AdamElementOf<Floats> second =
        adam_moments<mode>({w.second, m.second, v.second}, g.second, coefficients_);
    store(moments_.exp_avg + i, first.exp_avg);
    store(moments_.exp_avg + i + kLanes, second.exp_avg);
    store(moments_.exp_avg_sq + i, first.exp_avg_sq);
    store(moments_.exp_avg_sq + i + kLanes, second.exp_avg_sq);
    largest_exp_avg_ = larger(largest_exp_avg_, larger(bits_of(first.exp_avg) & ~kSign,
                                                       bits_of(second.exp_avg) & ~kSign));
    // Not negative; a NaN's sign bit does no harm here.
    largest_exp_avg_sq_ =
        larger(largest_exp_avg_sq_, larger(bits_of(first.exp_avg_sq), bits_of(second.exp_avg_sq)));
    return {first, second};
  }

  [[gnu::always_inline]] inline void update_weights(
      std::size_t i, const Pair<AdamElementOf<Floats>>& decayed) noexcept {
    const Pair<Bits> weights{bits_of(adam_weight(decayed.first, coefficients_)),
                             bits_of(adam_weight(decayed.second, coefficients_))};
    store(param_ + i, pack({weights.first + 0x8000, weights.second + 0x8000}, kUpperHalves));
    store(remainder_ + i, pack(weights, kLowerHalves));
  }

  /// The block's new scales.
  [[gnu::always_inline]] inline MomentScales scales() const noexcept {
    return {knee_of<kExpAvgRange>(largest_of(largest_exp_avg_)),
            knee_of<kExpAvgSqRange>(largest_of(largest_exp_avg_sq_))};
  }

 private:
  std::uint16_t* param_;
  std::int16_t* remainder_;
  const std::uint16_t* grad_;
  const std::uint8_t* exp_avg_;
  const std::uint8_t* exp_avg_sq_;
  MomentScales scales_;
  AdamCoefficients coefficients_;
  WaitingMoments& moments_;
  Bits largest_exp_avg_{};
  Bits largest_exp_avg_sq_{};
};

/// Encodes the block that begins at element `from`, kStride elements at a time.
class BlockEncoding {
 public:
  [[gnu::always_inline]] inline BlockEncoding(const AdamSegment& segment, std::size_t from,
                                              const WaitingMoments& moments,
                                              MomentScales scales) noexcept
      : exp_avg_(static_cast<std::uint8_t*>(segment.exp_avg) + from),
        exp_avg_sq_(static_cast<std::uint8_t*>(segment.exp_avg_sq) + from),
        scales_(scales),
        moments_(moments),
        random_({segment.rounding, segment.first_element + from}) {
    segment.scales[from / kMomentBlock] = scales;
  }

  [[gnu::always_inline]] inline void stride(std::size_t i) noexcept {
    const float* const m = moments_.exp_avg + i;
    const float* const v = moments_.exp_avg_sq + i;
    const Pair<Bits> random = random_.next();
    encode_exp_avgs(exp_avg_ + i, {load<Floats>(m), load<Floats>(m + kLanes)}, scales_.exp_avg,
                    random);
    encode_exp_avg_sqs(exp_avg_sq_ + i, {load<Floats>(v), load<Floats>(v + kLanes)},
                       scales_.exp_avg_sq, random);
  }

 private:
  std::uint8_t* exp_avg_;
  std::uint8_t* exp_avg_sq_;
  MomentScales scales_;
  const WaitingMoments& moments_;
  RandomLanes random_;
};

/// As SplitInt8Loop (adam_split.cc), with a block's update and the encoding of the one before it in
/// one loop: one after the other, each waits for some of the core's units while the rest stand
/// idle.
template <WeightDecayMode mode>
[[gnu::noinline]] void update_blocks(const AdamSegment& segment, std::size_t begin,
                                     std::size_t num_blocks) {
  WaitingMoments moments[2];
  BlockUpdate<mode> first(segment, begin, moments[0]);
  for (std::size_t i = 0; i < kMomentBlock; i += kStride)
    first.update_weights(i, first.update_moments(i));
  MomentScales scales = first.scales();
  std::size_t from = begin;
  for (std::size_t block = 1; block < num_blocks; ++block) {
    BlockEncoding encoding(segment, from, moments[(block - 1) % 2], scales);
    from += kMomentBlock;
    BlockUpdate<mode> update(segment, from, moments[block % 2]);
    for (std::size_t i = 0; i < kMomentBlock; i += kStride) {
      const auto decayed = update.update_moments(i);
      encoding.stride(i);
      update.update_weights(i, decayed);
    }
    scales = update.scales();
  }
  BlockEncoding last(segment, from, moments[(num_blocks - 1) % 2], scales);
  for (std::size_t i = 0; i < kMomentBlock; i += kStride)
    last.stride(i);
}

}  // namespace

void update_int8_avx512(WeightDecayMode mode, const AdamSegment& segment, std::size_t begin,
                        std::size_t num_blocks) {
  if (num_blocks == 0)
    return;
  const ScopedFlushToZero flush;
  switch (mode) {
    case WeightDecayMode::kDecoupled:
      return update_blocks<WeightDecayMode::kDecoupled>(segment, begin, num_blocks);
    case WeightDecayMode::kL2:
      return update_blocks<WeightDecayMode::kL2>(segment, begin, num_blocks);
  }
}

}  // namespace castor::detail

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
