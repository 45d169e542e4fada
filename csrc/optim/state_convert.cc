#include "optim/state_convert.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <string>

#include "core/error.h"
#include "optim/block_moments.h"
#include "optim/convert.h"
#include "optim/dispatch.h"
#include "optim/for_each_task.h"
#include "optim/rounding.h"
#include "optim/split_master.h"

namespace castor {
namespace {

struct SplitMasters {
  std::int16_t* __restrict remainder;
  const float* __restrict master;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    for (std::size_t i = 0; i < count; ++i)
      remainder[i] = detail::remainder_of(master[i]);
  }
};

struct JoinMasters {
  float* __restrict master;
  const std::uint16_t* __restrict param;
  const std::int16_t* __restrict remainder;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    for (std::size_t i = 0; i < count; ++i) {
      // A zero has a subnormal master, if any, which the update takes as zero.
      const std::uint16_t half = param[i];
      master[i] = detail::blend((half & 0x7fffu) == 0, from_bfloat16(half),
                                detail::join_master(half, remainder[i]));
    }
  }
};

struct ForgetRemainders {
  std::int16_t* __restrict remainder;
  const std::uint16_t* __restrict before;
  const std::uint16_t* __restrict after;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    for (std::size_t i = 0; i < count; ++i) {
      const int same = before[i] == after[i];
      remainder[i] = static_cast<std::int16_t>(remainder[i] & -same);
    }
  }
};

struct DecodeBlock {
  float* __restrict exp_avg;
  float* __restrict exp_avg_sq;
  const std::uint8_t* __restrict exp_avg_codes;
  const std::uint8_t* __restrict exp_avg_sq_codes;
  MomentScales scales;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    for (std::size_t i = 0; i < count; ++i) {
      exp_avg[i] = detail::decode_exp_avg(exp_avg_codes[i], scales.exp_avg);
      exp_avg_sq[i] = detail::decode_exp_avg_sq(exp_avg_sq_codes[i], scales.exp_avg_sq);
    }
  }
};

struct EncodeBlock {
  std::uint8_t* __restrict exp_avg_codes;
  std::uint8_t* __restrict exp_avg_sq_codes;
  const float* __restrict exp_avg;
  const float* __restrict exp_avg_sq;
  MomentScales scales;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    constexpr std::uint32_t kHalf = detail::kCodeStep / 2;
    for (std::size_t i = 0; i < count; ++i) {
      exp_avg_codes[i] = detail::encode_exp_avg(exp_avg[i], scales.exp_avg, kHalf);
      exp_avg_sq_codes[i] = detail::encode_exp_avg_sq(exp_avg_sq[i], scales.exp_avg_sq, kHalf);
    }
  }
};

/// The knee for values with this largest magnitude: the old one, if they could have been read with
/// it. Stochastic rounding moves the largest by up to a step, so that the knee it asks for may be a
/// neighbouring power of two: the one below the old, or the one above for values up to 17/16 of
/// what the old one is for.
template <std::uint32_t range>
float keep_or_make_knee(float old, std::uint32_t largest_bits) {
  constexpr float kReach = static_cast<float>(1u << range) * 1.0625f;
  const float knee = detail::knee_of<range>(largest_bits);
  const bool from_above = old == 2.0f * knee;
  const bool from_below = old == 0.5f * knee && std::bit_cast<float>(largest_bits) <= kReach * old;
  return from_above || from_below ? old : knee;
}

MomentScales scales_for(MomentScales old, const float* exp_avg, const float* exp_avg_sq,
                        std::size_t count) {
  std::uint32_t largest_exp_avg = 0;
  std::uint32_t largest_exp_avg_sq = 0;
  for (std::size_t i = 0; i < count; ++i) {
    largest_exp_avg = std::max(largest_exp_avg, detail::magnitude_bits(exp_avg[i]));
    largest_exp_avg_sq = std::max(largest_exp_avg_sq, detail::magnitude_bits(exp_avg_sq[i]));
  }
  return {keep_or_make_knee<detail::kExpAvgRange>(old.exp_avg, largest_exp_avg),
          keep_or_make_knee<detail::kExpAvgSqRange>(old.exp_avg_sq, largest_exp_avg_sq)};
}

/// Of the formats that keep moments as they are or rounded.
ScalarType scalar_type_of_moments(StateFormat format) {
  return format == StateFormat::kSplitBf16 ? ScalarType::kBFloat16 : ScalarType::kFloat32;
}

void require_not_negative(Executor* executor, const float* values, std::size_t numel) {
  std::atomic<bool> found = false;
  detail::for_each_task(executor, numel, [&](std::size_t begin, std::size_t count) {
    if (std::any_of(values + begin, values + begin + count, [](float v) { return v < 0.0f; }))
      found.store(true, std::memory_order_relaxed);  // read after the tasks have been joined
  });
  if (found) {
    throw InvalidArgument("exp_avg_sq has a negative element among " + std::to_string(numel) +
                          "; it is a mean of squares: load the state that was saved");
  }
}

}  // namespace

void split_masters(Executor* executor, std::int16_t* remainder, const float* master,
                   std::size_t numel) {
  detail::for_each_task(executor, numel, [=](std::size_t begin, std::size_t count) {
    detail::run_on(best_isa(), SplitMasters{remainder + begin, master + begin, count});
  });
}

void join_masters(Executor* executor, float* master, const std::uint16_t* param,
                  const std::int16_t* remainder, std::size_t numel) {
  detail::for_each_task(executor, numel, [=](std::size_t begin, std::size_t count) {
    detail::run_on(best_isa(),
                   JoinMasters{master + begin, param + begin, remainder + begin, count});
  });
}

void forget_remainders(Executor* executor, std::int16_t* remainder, const std::uint16_t* before,
                       const std::uint16_t* after, std::size_t numel) {
  detail::for_each_task(executor, numel, [=](std::size_t begin, std::size_t count) {
    detail::run_on(best_isa(),
                   ForgetRemainders{remainder + begin, before + begin, after + begin, count});
  });
}

void load_moments(Executor* executor, const MomentArrays& from, float* exp_avg, float* exp_avg_sq) {
  if (from.format != StateFormat::kSplitInt8) {
    const ScalarType type = scalar_type_of_moments(from.format);
    param_to_master(executor, exp_avg, from.exp_avg, from.numel, type);
    param_to_master(executor, exp_avg_sq, from.exp_avg_sq, from.numel, type);
    return;
  }
  detail::for_each_task(executor, from.numel, [&](std::size_t begin, std::size_t count) {
    for (std::size_t done = 0; done < count; done += kMomentBlock) {
      const std::size_t at = begin + done;
      detail::run_on(best_isa(), DecodeBlock{exp_avg + at, exp_avg_sq + at,
                                             static_cast<const std::uint8_t*>(from.exp_avg) + at,
                                             static_cast<const std::uint8_t*>(from.exp_avg_sq) + at,
                                             from.scales[at / kMomentBlock],
                                             std::min(kMomentBlock, count - done)});
    }
  });
}

void store_moments(Executor* executor, const MomentArrays& to, const float* exp_avg,
                   const float* exp_avg_sq) {
  require_not_negative(executor, exp_avg_sq, to.numel);
  if (to.format != StateFormat::kSplitInt8) {
    const ScalarType type = scalar_type_of_moments(to.format);
    master_to_param(executor, to.exp_avg, exp_avg, to.numel, type);
    master_to_param(executor, to.exp_avg_sq, exp_avg_sq, to.numel, type);
    return;
  }
  detail::for_each_task(executor, to.numel, [&](std::size_t begin, std::size_t count) {
    for (std::size_t done = 0; done < count; done += kMomentBlock) {
      const std::size_t at = begin + done;
      const std::size_t numel = std::min(kMomentBlock, count - done);
      MomentScales& scales = to.scales[at / kMomentBlock];
      scales = scales_for(scales, exp_avg + at, exp_avg_sq + at, numel);
      detail::run_on(best_isa(), EncodeBlock{static_cast<std::uint8_t*>(to.exp_avg) + at,
                                             static_cast<std::uint8_t*>(to.exp_avg_sq) + at,
                                             exp_avg + at, exp_avg_sq + at, scales, numel});
    }
  });
}

}  // namespace castor
