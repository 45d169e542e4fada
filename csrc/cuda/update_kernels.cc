#include "cuda/update_kernels.h"

#include <string>

#include "core/error.h"
#include "cuda/adam_kernel.h"
#include "optim/adam_rule.h"

namespace castor::cuda {
namespace {

struct Kernels {
  std::string_view rule;
  void (*update)(StateFormat, std::span<const UpdateSegment>, cudaStream_t);
};

constexpr Kernels kKernels[] = {
    {AdamRule::kName,
     [](StateFormat format, std::span<const UpdateSegment> segments, cudaStream_t stream) {
       adam_update(adam_segments(segments, format), stream);
     }},
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
  kernels->update(rule.format(), segments, stream);
}

}  // namespace castor::cuda
