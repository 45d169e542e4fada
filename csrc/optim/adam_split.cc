#include "optim/adam_split.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "optim/adam_element.h"
#include "optim/adam_int8_avx512.h"
#include "optim/block_moments.h"
#include "optim/dispatch.h"
#include "optim/moment_codec.h"
#include "optim/pairs.h"
#include "optim/rounding.h"
#include "optim/split_master.h"
#include "optim/stochastic.h"

namespace castor {
namespace {

using detail::Bf16Moments;
using detail::Pair;

/// Elements of one segment, as the loops take them.
template <typename Moment>
struct Elements {
  std::uint16_t* param;
  std::int16_t* remainder;
  Moment* exp_avg;
  Moment* exp_avg_sq;
  const std::uint16_t* grad;

  Elements(const AdamSegment& segment, std::size_t begin)
      : param(static_cast<std::uint16_t*>(segment.param) + begin),
        remainder(segment.remainder + begin),
        exp_avg(static_cast<Moment*>(segment.exp_avg) + begin),
        exp_avg_sq(static_cast<Moment*>(segment.exp_avg_sq) + begin),
        grad(static_cast<const std::uint16_t*>(segment.grad) + begin) {}
};

/// Updates a weight in place; the moments are the caller's to store.
template <WeightDecayMode mode>
[[gnu::always_inline]] inline AdamElement update_weight(std::uint16_t& param,
                                                        std::int16_t& remainder, float exp_avg,
                                                        float exp_avg_sq, std::uint16_t grad,
                                                        const AdamCoefficients& c) {
  const AdamElement updated = adam_element<mode>(
      {detail::join_master(param, remainder), exp_avg, exp_avg_sq}, from_bfloat16(grad), c);
  param = detail::param_of(updated.weight);
  remainder = detail::remainder_of(updated.weight);
  return updated;
}

struct MomentPairs {
  Pair<float> exp_avg;
  Pair<float> exp_avg_sq;
};

/// update_weight of elements 2 * i and 2 * i + 1.
template <WeightDecayMode mode>
[[gnu::always_inline]] inline MomentPairs update_weights(std::uint16_t* __restrict param,
                                                         std::int16_t* __restrict remainder,
                                                         const std::uint16_t* __restrict grad,
                                                         std::size_t i, Pair<float> exp_avg,
                                                         Pair<float> exp_avg_sq,
                                                         const AdamCoefficients& c) {
  const Pair<float> weight =
      detail::join_masters(detail::load_pair(param, i), detail::load_pair(remainder, i));
  const Pair<float> g = detail::pair_from_bfloat16(detail::load_pair(grad, i));
  const AdamElement first =
      adam_element<mode>({weight.first, exp_avg.first, exp_avg_sq.first}, g.first, c);
  const AdamElement second =
      adam_element<mode>({weight.second, exp_avg.second, exp_avg_sq.second}, g.second, c);
  detail::store_pair(param, i, detail::params_of({first.weight, second.weight}));
  detail::store_pair(remainder, i, detail::remainders_of({first.weight, second.weight}));
  return {{first.exp_avg, second.exp_avg}, {first.exp_avg_sq, second.exp_avg_sq}};
}

template <WeightDecayMode mode>
struct SplitLoop {
  const AdamSegment& segment;
  std::size_t begin;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    const Elements<float> at(segment, begin);
    update(at.param, at.remainder, at.exp_avg, at.exp_avg_sq, at.grad, count, segment.coefficients);
  }

  [[gnu::always_inline]] static inline void update(std::uint16_t* __restrict param,
                                                   std::int16_t* __restrict remainder,
                                                   float* __restrict exp_avg,
                                                   float* __restrict exp_avg_sq,
                                                   const std::uint16_t* __restrict grad,
                                                   std::size_t numel, AdamCoefficients c) {
    for (std::size_t i = 0; i < numel; ++i) {
      const AdamElement updated =
          update_weight<mode>(param[i], remainder[i], exp_avg[i], exp_avg_sq[i], grad[i], c);
      exp_avg[i] = updated.exp_avg;
      exp_avg_sq[i] = updated.exp_avg_sq;
    }
  }
};

template <WeightDecayMode mode>
struct SplitBf16Loop {
  const AdamSegment& segment;
  std::size_t begin;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    const AdamCoefficients c = segment.coefficients;
    for (std::size_t done = 0; done < count;) {
      const std::uint64_t index = segment.first_element + begin + done;
      const std::size_t room = kRoundingBlock - index % kRoundingBlock;
      const std::size_t numel = std::min(room, count - done);
      const RoundingSequence random(segment.rounding, index);
      const Elements<std::uint16_t> at(segment, begin + done);
      update(at.param, at.remainder, at.exp_avg, at.exp_avg_sq, at.grad, numel, random.start,
             random.step, c);
      done += numel;
    }
  }

  [[gnu::always_inline]] static inline void update(std::uint16_t* __restrict param,
                                                   std::int16_t* __restrict remainder,
                                                   std::uint16_t* __restrict exp_avg,
                                                   std::uint16_t* __restrict exp_avg_sq,
                                                   const std::uint16_t* __restrict grad,
                                                   std::size_t numel, std::uint32_t random,
                                                   std::uint32_t random_step, AdamCoefficients c) {
    for (std::size_t i = 0; i < numel / 2; ++i) {
      const MomentPairs updated = update_weights<mode>(
          param, remainder, grad, i, detail::pair_from_bfloat16(detail::load_pair(exp_avg, i)),
          detail::pair_from_bfloat16(detail::load_pair(exp_avg_sq, i)), c);
      const Pair<std::uint32_t> bits{random >> 16, (random + random_step) >> 16};
      detail::store_pair(exp_avg, i, Bf16Moments::round(updated.exp_avg, bits));
      detail::store_pair(exp_avg_sq, i, Bf16Moments::round(updated.exp_avg_sq, bits));
      random += 2 * random_step;
    }
    if (numel % 2 != 0) {
      const std::size_t last = numel - 1;
      const AdamElement updated =
          update_weight<mode>(param[last], remainder[last], Bf16Moments::load(exp_avg[last]),
                              Bf16Moments::load(exp_avg_sq[last]), grad[last], c);
      exp_avg[last] = Bf16Moments::round(updated.exp_avg, random >> 16);
      exp_avg_sq[last] = Bf16Moments::round(updated.exp_avg_sq, random >> 16);
    }
  }
};

/// The new moments of a block wait in the first-level cache until its largest ones are known, and
/// then for the next block's update: encoding at once would wait for the last division and for the
/// reduction of the maxima. With AVX-512, adam_int8_avx512.cc has the whole blocks.
template <WeightDecayMode mode>
struct SplitInt8Loop {
  const AdamSegment& segment;
  std::size_t begin;
  std::size_t count;

  /// fp32 moments of a block's pairs: the first elements, then the second ones.
  struct Halves {
    alignas(64) float first[kMomentBlock / 2];
    alignas(64) float second[kMomentBlock / 2];
  };

  struct Moments {
    Halves exp_avg;
    Halves exp_avg_sq;
    float exp_avg_knee;
    float exp_avg_sq_knee;
  };

  struct Largest {
    std::uint32_t exp_avg;
    std::uint32_t exp_avg_sq;
  };

  [[gnu::always_inline]] void operator()() const {
    const AdamCoefficients c = segment.coefficients;
    const std::size_t num_whole = count / kMomentBlock;
    const std::size_t rest = count % kMomentBlock;
    Moments moments[2];
    for (std::size_t block = 0; block < num_whole; ++block) {
      update_block(moments[block % 2], begin + block * kMomentBlock, kMomentBlock, c);
      if (block > 0)
        encode_block(moments[(block - 1) % 2], begin + (block - 1) * kMomentBlock, kMomentBlock);
    }
    if (num_whole > 0) {
      encode_block(moments[(num_whole - 1) % 2], begin + (num_whole - 1) * kMomentBlock,
                   kMomentBlock);
    }
    if (rest > 0) {
      update_block(moments[0], begin + num_whole * kMomentBlock, rest, c);
      encode_block(moments[0], begin + num_whole * kMomentBlock, rest);
    }
  }

  [[gnu::always_inline]] inline void update_block(Moments& moments, std::size_t from,
                                                  std::size_t numel,
                                                  const AdamCoefficients& c) const {
    const Elements<std::uint8_t> at(segment, from);
    const MomentScales scales = segment.scales[from / kMomentBlock];
    const std::size_t pairs = numel / 2;
    Halves& m = moments.exp_avg;
    Halves& v = moments.exp_avg_sq;
    decode(m.first, m.second, v.first, v.second, at.exp_avg, at.exp_avg_sq, scales, pairs);
    Largest largest =
        update(m.first, m.second, v.first, v.second, at.param, at.remainder, at.grad, pairs, c);
    if (numel % 2 != 0) {
      const std::size_t last = numel - 1;
      const AdamElement updated = update_weight<mode>(
          at.param[last], at.remainder[last],
          detail::decode_exp_avg(at.exp_avg[last], scales.exp_avg),
          detail::decode_exp_avg_sq(at.exp_avg_sq[last], scales.exp_avg_sq), at.grad[last], c);
      m.first[pairs] = updated.exp_avg;
      v.first[pairs] = updated.exp_avg_sq;
      largest = {std::max(largest.exp_avg, detail::magnitude_bits(updated.exp_avg)),
                 std::max(largest.exp_avg_sq, detail::magnitude_bits(updated.exp_avg_sq))};
    }
    moments.exp_avg_knee = detail::knee_of<detail::kExpAvgRange>(largest.exp_avg);
    moments.exp_avg_sq_knee = detail::knee_of<detail::kExpAvgSqRange>(largest.exp_avg_sq);
  }

  [[gnu::always_inline]] inline void encode_block(const Moments& moments, std::size_t from,
                                                  std::size_t numel) const {
    const Elements<std::uint8_t> at(segment, from);
    const RoundingSequence random(segment.rounding, segment.first_element + from);
    const MomentScales scales{moments.exp_avg_knee, moments.exp_avg_sq_knee};
    const std::size_t pairs = numel / 2;
    const Halves& m = moments.exp_avg;
    const Halves& v = moments.exp_avg_sq;
    encode(at.exp_avg, at.exp_avg_sq, m.first, m.second, v.first, v.second, scales, pairs,
           random.start, random.step);
    if (numel % 2 != 0) {
      const std::size_t last = numel - 1;
      const std::uint32_t bits =
          (random.start + static_cast<std::uint32_t>(last) * random.step) >> kUnusedBits;
      at.exp_avg[last] = detail::encode_exp_avg(m.first[pairs], scales.exp_avg, bits);
      at.exp_avg_sq[last] = detail::encode_exp_avg_sq(v.first[pairs], scales.exp_avg_sq, bits);
    }
    segment.scales[from / kMomentBlock] = scales;
  }

  [[gnu::always_inline]] static inline void decode(float* __restrict first_exp_avg,
                                                   float* __restrict second_exp_avg,
                                                   float* __restrict first_exp_avg_sq,
                                                   float* __restrict second_exp_avg_sq,
                                                   const std::uint8_t* __restrict exp_avg_codes,
                                                   const std::uint8_t* __restrict exp_avg_sq_codes,
                                                   MomentScales scales, std::size_t pairs) {
    for (std::size_t i = 0; i < pairs; ++i) {
      const Pair<float> m = detail::decode_exp_avg(load_codes(exp_avg_codes, i), scales.exp_avg);
      const Pair<float> v =
          detail::decode_exp_avg_sq(load_codes(exp_avg_sq_codes, i), scales.exp_avg_sq);
      first_exp_avg[i] = m.first;
      second_exp_avg[i] = m.second;
      first_exp_avg_sq[i] = v.first;
      second_exp_avg_sq[i] = v.second;
    }
  }

  [[gnu::always_inline]] static inline Largest update(
      float* __restrict first_exp_avg, float* __restrict second_exp_avg,
      float* __restrict first_exp_avg_sq, float* __restrict second_exp_avg_sq,
      std::uint16_t* __restrict param, std::int16_t* __restrict remainder,
      const std::uint16_t* __restrict grad, std::size_t pairs, AdamCoefficients c) {
    std::uint32_t largest_exp_avg = 0;
    std::uint32_t largest_exp_avg_sq = 0;
    for (std::size_t i = 0; i < pairs; ++i) {
      const MomentPairs updated =
          update_weights<mode>(param, remainder, grad, i, {first_exp_avg[i], second_exp_avg[i]},
                               {first_exp_avg_sq[i], second_exp_avg_sq[i]}, c);
      first_exp_avg[i] = updated.exp_avg.first;
      second_exp_avg[i] = updated.exp_avg.second;
      first_exp_avg_sq[i] = updated.exp_avg_sq.first;
      second_exp_avg_sq[i] = updated.exp_avg_sq.second;
      largest_exp_avg =
          std::max(largest_exp_avg, std::max(detail::magnitude_bits(updated.exp_avg.first),
                                             detail::magnitude_bits(updated.exp_avg.second)));
      // Not negative; a NaN's sign bit does no harm here.
      largest_exp_avg_sq = std::max(
          largest_exp_avg_sq, std::max(std::bit_cast<std::uint32_t>(updated.exp_avg_sq.first),
                                       std::bit_cast<std::uint32_t>(updated.exp_avg_sq.second)));
    }
    return {largest_exp_avg, largest_exp_avg_sq};
  }

  [[gnu::always_inline]] static inline void encode(
      std::uint8_t* __restrict exp_avg_codes, std::uint8_t* __restrict exp_avg_sq_codes,
      const float* __restrict first_exp_avg, const float* __restrict second_exp_avg,
      const float* __restrict first_exp_avg_sq, const float* __restrict second_exp_avg_sq,
      MomentScales scales, std::size_t pairs, std::uint32_t random, std::uint32_t random_step) {
    for (std::size_t i = 0; i < pairs; ++i) {
      const Pair<std::uint32_t> bits{random >> kUnusedBits, (random + random_step) >> kUnusedBits};
      store_codes(
          exp_avg_codes, i,
          detail::encode_exp_avg({first_exp_avg[i], second_exp_avg[i]}, scales.exp_avg, bits));
      store_codes(exp_avg_sq_codes, i,
                  detail::encode_exp_avg_sq({first_exp_avg_sq[i], second_exp_avg_sq[i]},
                                            scales.exp_avg_sq, bits));
      random += 2 * random_step;
    }
  }

  static constexpr unsigned kUnusedBits = 32 - detail::kCodeShift;

  [[gnu::always_inline]] static inline std::uint16_t load_codes(const std::uint8_t* codes,
                                                                std::size_t i) {
    std::uint16_t pair;
    std::memcpy(&pair, codes + 2 * i, sizeof pair);
    return pair;
  }

  [[gnu::always_inline]] static inline void store_codes(std::uint8_t* codes, std::size_t i,
                                                        std::uint16_t pair) {
    std::memcpy(codes + 2 * i, &pair, sizeof pair);
  }
};

template <WeightDecayMode mode>
void update_as(Isa isa, const AdamSegment& segment, std::size_t begin, std::size_t count) {
  switch (segment.format) {
    case StateFormat::kFp32: break;  // adam.cc
    case StateFormat::kSplit: return detail::run_on(isa, SplitLoop<mode>{segment, begin, count});
    case StateFormat::kSplitBf16:
      return detail::run_on(isa, SplitBf16Loop<mode>{segment, begin, count});
    case StateFormat::kSplitInt8: {
      std::size_t done = 0;
#if defined(__x86_64__)
      if (isa == Isa::kAvx512) {
        done = count / kMomentBlock * kMomentBlock;
        detail::update_int8_avx512(mode, segment, begin, done / kMomentBlock);
      }
#endif
      if (done < count)
        detail::run_on(isa, SplitInt8Loop<mode>{segment, begin + done, count - done});
      return;
    }
  }
}

}  // namespace

void detail::update_split(Isa isa, const AdamSegment& segment, std::size_t begin,
                          std::size_t count) {
  if (segment.coefficients.l2_factor != 0.0f) {
    update_as<WeightDecayMode::kL2>(isa, segment, begin, count);
  } else {
    update_as<WeightDecayMode::kDecoupled>(isa, segment, begin, count);
  }
}

}  // namespace castor
