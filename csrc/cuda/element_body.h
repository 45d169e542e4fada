#pragma once

// Internal to csrc/cuda. The work of a thread in the kernels of rules that update one element after
// another (SGD, Lion), in plain C++: without a GPU, tests run these bodies index by index against
// the CPU loops.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "cuda/segment_batch.h"
#include "optim/element_state.h"
#include "optim/elementwise.h"
#include "optim/rounding.h"
#include "optim/split_master.h"
#include "optim/update_rule.h"

namespace castor::cuda {

/// An UpdateSegment of a rule whose coefficients are an `Element`, in fewer bytes, so that more of
/// them go in one launch.
template <typename Element>
struct ElementSegment {
  void* param = nullptr;
  const void* grad = nullptr;
  float* master = nullptr;            ///< fp32 masters beside 16-bit parameters
  std::int16_t* remainder = nullptr;  ///< in a split format
  float* state = nullptr;             ///< null where the rule keeps none
  std::size_t numel = 0;
  Element element;
};

// load() and store() are separate so that a thread has the loads of several elements under way. The
// compiler may not move a load over a store that could alias it.

/// Update of one element whose master is fp32: the parameter itself, or kept beside it.
template <typename Element, ScalarType type>
struct MasterBody {
  using Segment = ElementSegment<Element>;
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;
  static constexpr bool kOwnMaster = type == ScalarType::kFloat32;

  struct Loaded {
    float weight;
    float state;
    Storage grad;
    Storage param;
  };

  CASTOR_ELEMENTWISE static Loaded load(const Segment& segment, std::size_t i) noexcept {
    Loaded loaded{.weight = 0.0f,
                  .state = 0.0f,
                  .grad = static_cast<const Storage*>(segment.grad)[i],
                  .param = static_cast<const Storage*>(segment.param)[i]};
    if constexpr (kOwnMaster) {
      loaded.weight = loaded.param;
    } else {
      loaded.weight = segment.master[i];
    }
    if constexpr (Element::kHasState)
      loaded.state = segment.state[i];
    return loaded;
  }

  CASTOR_ELEMENTWISE static void store(const Segment& segment, std::size_t i,
                                       const Loaded& loaded) noexcept {
    castor::detail::ElementState old{loaded.weight, loaded.state};
    if constexpr (!kOwnMaster) {
      // User code wrote the parameter where it is not the rounding of its master.
      old.weight = castor::detail::blend(loaded.param == Codec::round(loaded.weight), loaded.weight,
                                         Codec::load(loaded.param));
    }
    const castor::detail::ElementState updated = segment.element(old, Codec::load(loaded.grad));
    const float weight = castor::detail::plain_nan(updated.weight);
    if constexpr (!kOwnMaster)
      segment.master[i] = weight;
    static_cast<Storage*>(segment.param)[i] = Codec::round(weight);
    if constexpr (Element::kHasState)
      segment.state[i] = castor::detail::plain_nan(updated.state);
  }
};

/// Update of one element whose parameter is the upper half of its master (docs/design/0012).
template <typename Element>
struct SplitMasterBody {
  using Segment = ElementSegment<Element>;

  struct Loaded {
    std::uint16_t param;
    std::int16_t remainder;
    std::uint16_t grad;
    float state;
  };

  CASTOR_ELEMENTWISE static Loaded load(const Segment& segment, std::size_t i) noexcept {
    Loaded loaded{.param = static_cast<const std::uint16_t*>(segment.param)[i],
                  .remainder = segment.remainder[i],
                  .grad = static_cast<const std::uint16_t*>(segment.grad)[i],
                  .state = 0.0f};
    if constexpr (Element::kHasState)
      loaded.state = segment.state[i];
    return loaded;
  }

  CASTOR_ELEMENTWISE static void store(const Segment& segment, std::size_t i,
                                       const Loaded& loaded) noexcept {
    const castor::detail::ElementState updated =
        segment.element({castor::detail::join_master(loaded.param, loaded.remainder), loaded.state},
                        from_bfloat16(loaded.grad));
    const float weight = castor::detail::plain_nan(updated.weight);
    static_cast<std::uint16_t*>(segment.param)[i] = castor::detail::param_of(weight);
    segment.remainder[i] = castor::detail::remainder_of(weight);
    if constexpr (Element::kHasState)
      segment.state[i] = castor::detail::plain_nan(updated.state);
  }
};

/// Calls work.operator()<Body>(batch) for batches that cover the segments of a rule whose
/// coefficients are an `Element`. Throws InvalidArgument before the first call for a type that has
/// no arithmetic.
template <typename Element, typename Work>
void for_each_element_batch(bool split, std::span<const UpdateSegment> segments, const Work& work) {
  using Segment = ElementSegment<Element>;
  constexpr ScalarType kTypes[] = {ScalarType::kFloat32, ScalarType::kBFloat16,
                                   ScalarType::kFloat16};
  std::vector<Segment> of_type[std::size(kTypes)];
  for (const UpdateSegment& segment : segments) {
    const auto* const type = std::find(std::begin(kTypes), std::end(kTypes), segment.type);
    if (type == std::end(kTypes))
      throw_no_arithmetic(segment.type);
    of_type[type - kTypes].push_back({.param = segment.param,
                                      .grad = segment.grad,
                                      .master = segment.master,
                                      .remainder = segment.remainder,
                                      .state = static_cast<float*>(segment.states[0]),
                                      .numel = segment.numel,
                                      .element = segment.coefficients.as<Element>()});
  }
  const auto run = [&work]<typename Body>(const std::vector<Segment>& alike) {
    for (const auto& batch : make_batches<Segment>(alike, kTileElements))
      work.template operator()<Body>(batch);
  };
  run.template operator()<MasterBody<Element, ScalarType::kFloat32>>(of_type[0]);
  if (split) {
    run.template operator()<SplitMasterBody<Element>>(of_type[1]);
  } else {
    run.template operator()<MasterBody<Element, ScalarType::kBFloat16>>(of_type[1]);
  }
  run.template operator()<MasterBody<Element, ScalarType::kFloat16>>(of_type[2]);
}

}  // namespace castor::cuda
