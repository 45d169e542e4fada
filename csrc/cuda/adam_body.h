#pragma once

// Internal to csrc/cuda. The work of a thread of the Adam kernels, in plain C++: without a GPU,
// tests run these bodies index by index against the CPU loops.

#include <cstddef>
#include <cstdint>

#include "optim/adam.h"
#include "optim/adam_element.h"
#include "optim/block_moments.h"
#include "optim/elementwise.h"
#include "optim/moment_codec.h"
#include "optim/rounding.h"
#include "optim/split_master.h"
#include "optim/stochastic.h"

namespace castor::cuda {

// load() and store() are separate so that a thread has the loads of several elements under way. The
// compiler may not move a load over a store that could alias it.

/// Update of one element of a segment in kFp32.
template <ScalarType type, WeightDecayMode mode>
struct Fp32Body {
  using Segment = AdamSegment;
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;

  struct Loaded {
    float master;
    float exp_avg;
    float exp_avg_sq;
    Storage grad;
    Storage param;
  };

  CASTOR_ELEMENTWISE static Loaded load(const AdamSegment& segment, std::size_t i) noexcept {
    Loaded loaded{.master = segment.master[i],
                  .exp_avg = static_cast<const float*>(segment.exp_avg)[i],
                  .exp_avg_sq = static_cast<const float*>(segment.exp_avg_sq)[i],
                  .grad = static_cast<const Storage*>(segment.grad)[i],
                  .param = Storage{}};
    if constexpr (type != ScalarType::kFloat32) {
      loaded.param = static_cast<const Storage*>(segment.param)[i];
    }
    return loaded;
  }

  CASTOR_ELEMENTWISE static void store(const AdamSegment& segment, std::size_t i,
                                       const Loaded& loaded) noexcept {
    float weight = loaded.master;
    if constexpr (type != ScalarType::kFloat32) {
      // User code wrote the parameter where it is not the rounding of its master.
      weight =
          detail::blend(loaded.param == Codec::round(weight), weight, Codec::load(loaded.param));
    }
    const AdamElement updated =
        detail::with_plain_nans(adam_element<mode>({weight, loaded.exp_avg, loaded.exp_avg_sq},
                                                   Codec::load(loaded.grad), segment.coefficients));
    segment.master[i] = updated.weight;
    static_cast<float*>(segment.exp_avg)[i] = updated.exp_avg;
    static_cast<float*>(segment.exp_avg_sq)[i] = updated.exp_avg_sq;
    if constexpr (type != ScalarType::kFloat32) {
      static_cast<Storage*>(segment.param)[i] = Codec::round(updated.weight);
    }
  }
};

/// Update of one element of a segment in kSplit (detail::Fp32Moments) or kSplitBf16
/// (detail::Bf16Moments).
template <typename Moments, WeightDecayMode mode>
struct SplitBody {
  using Segment = AdamSegment;
  using Moment = typename Moments::Storage;

  struct Loaded {
    std::uint16_t param;
    std::int16_t remainder;
    std::uint16_t grad;
    Moment exp_avg;
    Moment exp_avg_sq;
  };

  CASTOR_ELEMENTWISE static Loaded load(const AdamSegment& segment, std::size_t i) noexcept {
    return {.param = static_cast<const std::uint16_t*>(segment.param)[i],
            .remainder = segment.remainder[i],
            .grad = static_cast<const std::uint16_t*>(segment.grad)[i],
            .exp_avg = static_cast<const Moment*>(segment.exp_avg)[i],
            .exp_avg_sq = static_cast<const Moment*>(segment.exp_avg_sq)[i]};
  }

  CASTOR_ELEMENTWISE static void store(const AdamSegment& segment, std::size_t i,
                                       const Loaded& loaded) noexcept {
    const AdamElement updated = detail::with_plain_nans(
        adam_element<mode>({detail::join_master(loaded.param, loaded.remainder),
                            Moments::load(loaded.exp_avg), Moments::load(loaded.exp_avg_sq)},
                           from_bfloat16(loaded.grad), segment.coefficients));
    std::uint32_t random = 0;
    if constexpr (Moments::kRounds) {
      random = RoundingSequence(segment.rounding, segment.first_element + i).start >> 16;
    }
    static_cast<std::uint16_t*>(segment.param)[i] = detail::param_of(updated.weight);
    segment.remainder[i] = detail::remainder_of(updated.weight);
    static_cast<Moment*>(segment.exp_avg)[i] = Moments::round(updated.exp_avg, random);
    static_cast<Moment*>(segment.exp_avg_sq)[i] = Moments::round(updated.exp_avg_sq, random);
  }
};

/// Update of one element of a segment in kSplitInt8. Its moments share scales with the rest of its
/// block of kMomentBlock elements: all of a block are updated before its scales are known.
template <WeightDecayMode mode>
struct BlockBody {
  struct Moments {
    float exp_avg;
    float exp_avg_sq;
  };

  /// Bits of magnitudes; the largest of a block make its scales.
  struct Magnitudes {
    std::uint32_t exp_avg;
    std::uint32_t exp_avg_sq;
  };

  /// Writes parameter and remainder, and returns the new moments.
  CASTOR_ELEMENTWISE static Moments update(const AdamSegment& segment, std::size_t i) noexcept {
    auto* const param = static_cast<std::uint16_t*>(segment.param);
    const MomentScales scales = segment.scales[i / kMomentBlock];
    const AdamElement updated = detail::with_plain_nans(adam_element<mode>(
        {detail::join_master(param[i], segment.remainder[i]),
         detail::decode_exp_avg(static_cast<const std::uint8_t*>(segment.exp_avg)[i],
                                scales.exp_avg),
         detail::decode_exp_avg_sq(static_cast<const std::uint8_t*>(segment.exp_avg_sq)[i],
                                   scales.exp_avg_sq)},
        from_bfloat16(static_cast<const std::uint16_t*>(segment.grad)[i]), segment.coefficients));
    param[i] = detail::param_of(updated.weight);
    segment.remainder[i] = detail::remainder_of(updated.weight);
    return {updated.exp_avg, updated.exp_avg_sq};
  }

  CASTOR_ELEMENTWISE static Magnitudes magnitudes(const Moments& moments) noexcept {
    return {detail::magnitude_bits(moments.exp_avg), detail::magnitude_bits(moments.exp_avg_sq)};
  }

  CASTOR_ELEMENTWISE static MomentScales scales_for(const Magnitudes& largest) noexcept {
    return {detail::knee_of<detail::kExpAvgRange>(largest.exp_avg),
            detail::knee_of<detail::kExpAvgSqRange>(largest.exp_avg_sq)};
  }

  CASTOR_ELEMENTWISE static void encode(const AdamSegment& segment, std::size_t i,
                                        const Moments& moments,
                                        const MomentScales& scales) noexcept {
    constexpr unsigned kUnused = 32 - detail::kCodeShift;
    const std::uint32_t random =
        RoundingSequence(segment.rounding, segment.first_element + i).start >> kUnused;
    static_cast<std::uint8_t*>(segment.exp_avg)[i] =
        detail::encode_exp_avg(moments.exp_avg, scales.exp_avg, random);
    static_cast<std::uint8_t*>(segment.exp_avg_sq)[i] =
        detail::encode_exp_avg_sq(moments.exp_avg_sq, scales.exp_avg_sq, random);
  }
};

}  // namespace castor::cuda
