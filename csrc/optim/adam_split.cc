#include "optim/adam_split.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "optim/adam_element.h"
#include "optim/block_moments.h"
#include "optim/dispatch.h"
#include "optim/moment_codec.h"
#include "optim/rounding.h"
#include "optim/split_master.h"
#include "optim/stochastic.h"

namespace castor {
namespace {

using detail::Bf16Moments;
using detail::Fp32Moments;

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

template <typename Moments, WeightDecayMode mode>
struct SplitLoop {
  const AdamSegment& segment;
  std::size_t begin;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    const AdamCoefficients c = segment.coefficients;
    if constexpr (!Moments::kRounds) {
      run(begin, count, 0, 0, c);
    } else {
      for (std::size_t done = 0; done < count;) {
        const std::uint64_t index = segment.first_element + begin + done;
        const std::size_t room = kRoundingBlock - index % kRoundingBlock;
        const std::size_t numel = std::min(room, count - done);
        const RoundingSequence random(segment.rounding, index);
        run(begin + done, numel, random.start, random.step, c);
        done += numel;
      }
    }
  }

  [[gnu::always_inline]] inline void run(std::size_t from, std::size_t numel, std::uint32_t random,
                                         std::uint32_t random_step,
                                         const AdamCoefficients& c) const {
    const Elements<typename Moments::Storage> at(segment, from);
    update(at.param, at.remainder, at.exp_avg, at.exp_avg_sq, at.grad, numel, random, random_step,
           c);
  }

  template <typename Storage>
  [[gnu::always_inline]] static inline void update(std::uint16_t* __restrict param,
                                                   std::int16_t* __restrict remainder,
                                                   Storage* __restrict exp_avg,
                                                   Storage* __restrict exp_avg_sq,
                                                   const std::uint16_t* __restrict grad,
                                                   std::size_t numel, std::uint32_t random,
                                                   std::uint32_t random_step, AdamCoefficients c) {
    for (std::size_t i = 0; i < numel; ++i) {
      const AdamElement updated =
          adam_element<mode>({detail::join_master(param[i], remainder[i]),
                              Moments::load(exp_avg[i]), Moments::load(exp_avg_sq[i])},
                             from_bfloat16(grad[i]), c);
      param[i] = detail::param_of(updated.weight);
      remainder[i] = detail::remainder_of(updated.weight);
      exp_avg[i] = Moments::round(updated.exp_avg, random >> 16);
      exp_avg_sq[i] = Moments::round(updated.exp_avg_sq, random >> 16);
      random += random_step;
    }
  }
};

/// The new moments of a block wait in the first-level cache until its largest ones are known, and
/// then for the next block's update: encoding at once would wait for the last division and for the
/// reduction of the maxima.
template <WeightDecayMode mode>
struct BlockLoop {
  const AdamSegment& segment;
  std::size_t begin;
  std::size_t count;

  struct Moments {
    alignas(64) float exp_avg[kMomentBlock];
    alignas(64) float exp_avg_sq[kMomentBlock];
    float exp_avg_knee;
    float exp_avg_sq_knee;
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
    decode(moments.exp_avg, moments.exp_avg_sq, at.exp_avg, at.exp_avg_sq, scales.exp_avg,
           scales.exp_avg_sq, numel);
    const Largest largest =
        update(moments.exp_avg, moments.exp_avg_sq, at.param, at.remainder, at.grad, numel, c);
    moments.exp_avg_knee = detail::knee_of<detail::kExpAvgRange>(largest.exp_avg);
    moments.exp_avg_sq_knee = detail::knee_of<detail::kExpAvgSqRange>(largest.exp_avg_sq);
  }

  [[gnu::always_inline]] inline void encode_block(const Moments& moments, std::size_t from,
                                                  std::size_t numel) const {
    const Elements<std::uint8_t> at(segment, from);
    const RoundingSequence random(segment.rounding, segment.first_element + from);
    encode(at.exp_avg, at.exp_avg_sq, moments.exp_avg, moments.exp_avg_sq, moments.exp_avg_knee,
           moments.exp_avg_sq_knee, numel, random.start, random.step);
    segment.scales[from / kMomentBlock] = {moments.exp_avg_knee, moments.exp_avg_sq_knee};
  }

  [[gnu::always_inline]] static inline void decode(float* __restrict exp_avg,
                                                   float* __restrict exp_avg_sq,
                                                   const std::uint8_t* __restrict exp_avg_codes,
                                                   const std::uint8_t* __restrict exp_avg_sq_codes,
                                                   float exp_avg_knee, float exp_avg_sq_knee,
                                                   std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) {
      exp_avg[i] = detail::decode_exp_avg(exp_avg_codes[i], exp_avg_knee);
      exp_avg_sq[i] = detail::decode_exp_avg_sq(exp_avg_sq_codes[i], exp_avg_sq_knee);
    }
  }

  struct Largest {
    std::uint32_t exp_avg;
    std::uint32_t exp_avg_sq;
  };

  [[gnu::always_inline]] static inline Largest update(float* __restrict exp_avg,
                                                      float* __restrict exp_avg_sq,
                                                      std::uint16_t* __restrict param,
                                                      std::int16_t* __restrict remainder,
                                                      const std::uint16_t* __restrict grad,
                                                      std::size_t numel, AdamCoefficients c) {
    std::uint32_t largest_exp_avg = 0;
    std::uint32_t largest_exp_avg_sq = 0;
    for (std::size_t i = 0; i < numel; ++i) {
      const AdamElement updated = adam_element<mode>(
          {detail::join_master(param[i], remainder[i]), exp_avg[i], exp_avg_sq[i]},
          from_bfloat16(grad[i]), c);
      param[i] = detail::param_of(updated.weight);
      remainder[i] = detail::remainder_of(updated.weight);
      exp_avg[i] = updated.exp_avg;
      exp_avg_sq[i] = updated.exp_avg_sq;
      largest_exp_avg = std::max(largest_exp_avg, detail::magnitude_bits(updated.exp_avg));
      // Not negative; a NaN's sign bit does no harm here.
      largest_exp_avg_sq =
          std::max(largest_exp_avg_sq, std::bit_cast<std::uint32_t>(updated.exp_avg_sq));
    }
    return {largest_exp_avg, largest_exp_avg_sq};
  }

  [[gnu::always_inline]] static inline void encode(
      std::uint8_t* __restrict exp_avg_codes, std::uint8_t* __restrict exp_avg_sq_codes,
      const float* __restrict exp_avg, const float* __restrict exp_avg_sq, float exp_avg_knee,
      float exp_avg_sq_knee, std::size_t numel, std::uint32_t random, std::uint32_t random_step) {
    constexpr unsigned kUnused = 32 - detail::kCodeShift;
    for (std::size_t i = 0; i < numel; ++i) {
      exp_avg_codes[i] = detail::encode_exp_avg(exp_avg[i], exp_avg_knee, random >> kUnused);
      exp_avg_sq_codes[i] =
          detail::encode_exp_avg_sq(exp_avg_sq[i], exp_avg_sq_knee, random >> kUnused);
      random += random_step;
    }
  }
};

template <WeightDecayMode mode>
void update_as(Isa isa, const AdamSegment& segment, std::size_t begin, std::size_t count) {
  switch (segment.format) {
    case StateFormat::kFp32: break;  // adam.cc
    case StateFormat::kSplit:
      return detail::run_on(isa, SplitLoop<Fp32Moments, mode>{segment, begin, count});
    case StateFormat::kSplitBf16:
      return detail::run_on(isa, SplitLoop<Bf16Moments, mode>{segment, begin, count});
    case StateFormat::kSplitInt8:
      return detail::run_on(isa, BlockLoop<mode>{segment, begin, count});
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
