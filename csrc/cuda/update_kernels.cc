#include "cuda/update_kernels.h"

#include <string>

#include "core/error.h"
#include "cuda/adam_kernel.h"
#include "cuda/element_kernel.h"
#include "optim/adam_rule.h"
#include "optim/lion_element.h"
#include "optim/lion_rule.h"
#include "optim/sgd_element.h"
#include "optim/sgd_rule.h"

namespace castor::cuda {
namespace {

struct Kernels {
  std::string_view rule;
  void (*update)(const UpdateRule&, std::span<const UpdateSegment>, cudaStream_t);
};

constexpr Kernels kKernels[] = {
    {AdamRule::kName,
     [](const UpdateRule& rule, std::span<const UpdateSegment> segments, cudaStream_t stream) {
       adam_update(adam_segments(segments, rule.format()), stream);
     }},
    {LionRule::kName, &element_update<LionElement>},
    {SgdRule<Momentum::kNone>::kName, &element_update<SgdElement<false>>},
    {SgdRule<Momentum::kBuffer>::kName, &element_update<SgdElement<true>>},
};

const Kernels* kernels_of(std::string_view rule) noexcept {
  for (const Kernels& kernels : kKernels) {
    if (kernels.rule == rule)
      return &kernels;
  }
  return nullptr;
}

}  // namespace

bool has_kernels(std::string_view rule) noexcept { return kernels_of(rule) != nullptr; }

void update(const UpdateRule& rule, std::span<const UpdateSegment> segments, cudaStream_t stream) {
  const Kernels* const kernels = kernels_of(rule.name());
  if (kernels == nullptr) {
    throw InvalidArgument("there are no kernels for the update rule '" + std::string(rule.name()) +
                          "'");
  }
  kernels->update(rule, segments, stream);
}

}  // namespace castor::cuda
