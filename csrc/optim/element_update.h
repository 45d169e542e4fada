#pragma once

// Internal to csrc/optim: the loops of rules that update one element after another and keep at most
// one fp32 state of each. A rule brings the function of one element. This file says what a weight
// and its master are in each type and state format.

#include <cstddef>
#include <cstdint>
#include <span>

#include "optim/dispatch.h"
#include "optim/element_check.h"
#include "optim/element_state.h"
#include "optim/elementwise.h"
#include "optim/rounding.h"
#include "optim/segment_pieces.h"
#include "optim/split_master.h"
#include "optim/update_rule.h"

namespace castor::detail {

/// Runs `Element` (operator()(ElementState old, float grad), kHasState) over fp32 masters. The
/// masters are the parameters themselves, or kept beside 16-bit ones, as AdamSegment describes for
/// kFp32.
template <typename Element, ScalarType type>
struct MasterLoop {
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;
  static constexpr bool kOwnMaster = type == ScalarType::kFloat32;

  const UpdateSegment& segment;
  std::size_t begin;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    auto* const param = static_cast<Storage*>(segment.param) + begin;
    const auto* const grad = static_cast<const Storage*>(segment.grad) + begin;
    float* const state =
        Element::kHasState ? static_cast<float*>(segment.states[0]) + begin : nullptr;
    const auto element = segment.coefficients.as<Element>();
    if constexpr (kOwnMaster) {
      run(param, state, grad, static_cast<Storage*>(nullptr), count, element);
    } else {
      run(segment.master + begin, state, grad, param, count, element);
    }
  }

  [[gnu::always_inline]] static inline void run(float* __restrict master,
                                                [[maybe_unused]] float* __restrict state,
                                                const Storage* __restrict grad,
                                                [[maybe_unused]] Storage* __restrict param,
                                                std::size_t count, Element element) {
    for (std::size_t i = 0; i < count; ++i) {
      ElementState old{master[i], 0.0f};
      if constexpr (!kOwnMaster) {
        const Storage seen = param[i];
        old.weight = blend(seen == Codec::round(old.weight), old.weight, Codec::load(seen));
      }
      if constexpr (Element::kHasState)
        old.state = state[i];
      const ElementState updated = element(old, Codec::load(grad[i]));
      master[i] = updated.weight;
      if constexpr (Element::kHasState)
        state[i] = updated.state;
      if constexpr (!kOwnMaster)
        param[i] = Codec::round(updated.weight);
    }
  }
};

/// Runs `Element` over masters whose upper halves are the parameters (docs/design/0012).
template <typename Element>
struct SplitMasterLoop {
  const UpdateSegment& segment;
  std::size_t begin;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    float* const state =
        Element::kHasState ? static_cast<float*>(segment.states[0]) + begin : nullptr;
    run(static_cast<std::uint16_t*>(segment.param) + begin, segment.remainder + begin, state,
        static_cast<const std::uint16_t*>(segment.grad) + begin, count,
        segment.coefficients.as<Element>());
  }

  [[gnu::always_inline]] static inline void run(std::uint16_t* __restrict param,
                                                std::int16_t* __restrict remainder,
                                                [[maybe_unused]] float* __restrict state,
                                                const std::uint16_t* __restrict grad,
                                                std::size_t count, Element element) {
    for (std::size_t i = 0; i < count; ++i) {
      ElementState old{join_master(param[i], remainder[i]), 0.0f};
      if constexpr (Element::kHasState)
        old.state = state[i];
      const ElementState updated = element(old, from_bfloat16(grad[i]));
      param[i] = param_of(updated.weight);
      remainder[i] = remainder_of(updated.weight);
      if constexpr (Element::kHasState)
        state[i] = updated.state;
    }
  }
};

/// Implements UpdateRule::update for a rule whose coefficients are an `Element`, on one of
/// supported_isas().
template <typename Element>
void update_elements(const UpdateRule& rule, Executor& executor,
                     std::span<const UpdateSegment> segments, Isa isa) {
  const bool split = rule.splits_masters();
  check_segments(rule, segments);
  for_each_piece(
      executor, segments, [&](const UpdateSegment& segment, std::size_t begin, std::size_t count) {
        if (split)
          return run_on(isa, SplitMasterLoop<Element>{segment, begin, count});
        switch (segment.type) {
          case ScalarType::kFloat32:
            return run_on(isa, MasterLoop<Element, ScalarType::kFloat32>{segment, begin, count});
          case ScalarType::kBFloat16:
            return run_on(isa, MasterLoop<Element, ScalarType::kBFloat16>{segment, begin, count});
          case ScalarType::kFloat16:
            return run_on(isa, MasterLoop<Element, ScalarType::kFloat16>{segment, begin, count});
          case ScalarType::kUInt8: throw_no_arithmetic(segment.type);
        }
      });
}

}  // namespace castor::detail
