#pragma once

// Internal to csrc/cuda. The work of a thread in the kernel of means, in plain C++: without a GPU,
// tests run it index by index against the CPU loop.

#include <cstddef>

#include "optim/elementwise.h"
#include "optim/rounding.h"

namespace castor::cuda {

/// Mean of gradients of `numel` elements each, which lie one behind the other from `parts` on. It
/// has the bits of castor::average(): a sum in that order in fp32, divided, and rounded once.
/// `mean` may be `parts`, since a thread reads no element that another one writes.
template <ScalarType type>
struct MeanOfParts {
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;

  Storage* mean;
  const Storage* parts;
  std::size_t count;
  std::size_t numel;

  CASTOR_ELEMENTWISE void run(std::size_t i) const noexcept {
    float sum = Codec::load(parts[i]);
    for (std::size_t part = 1; part < count; ++part)
      sum += Codec::load(parts[part * numel + i]);
    mean[i] = Codec::round(sum / static_cast<float>(count));
  }
};

/// Calls work(MeanOfParts<...>) for parts of `type`. Throws InvalidArgument for a type that has no
/// arithmetic.
template <typename Work>
void for_mean_of(void* mean, const void* parts, std::size_t count, std::size_t numel,
                 ScalarType type, const Work& work) {
  const auto run = [&]<ScalarType kType>() {
    using Storage = typename ScalarCodec<kType>::Storage;
    work(MeanOfParts<kType>{.mean = static_cast<Storage*>(mean),
                            .parts = static_cast<const Storage*>(parts),
                            .count = count,
                            .numel = numel});
  };
  switch (type) {
    case ScalarType::kFloat32: return run.template operator()<ScalarType::kFloat32>();
    case ScalarType::kBFloat16: return run.template operator()<ScalarType::kBFloat16>();
    case ScalarType::kFloat16: return run.template operator()<ScalarType::kFloat16>();
    case ScalarType::kUInt8: throw_no_arithmetic(type);
  }
}

}  // namespace castor::cuda
