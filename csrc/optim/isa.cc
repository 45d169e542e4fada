#include "optim/isa.h"

#include <array>
#include <cstddef>

namespace castor {
namespace {

struct IsaList {
  std::array<Isa, 3> isas{Isa::kBaseline};
  std::size_t count = 1;

  IsaList() noexcept {
#if defined(__x86_64__)
    // The conditions match the targets in dispatch.h and adam_int8_avx512.cc; the builtin also asks
    // the operating system whether it saves the wider registers.
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      isas[count++] = Isa::kAvx2;
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        isas[count++] = Isa::kAvx512;
      }
    }
#endif
  }
};

const IsaList& isa_list() noexcept {
  static const IsaList list;
  return list;
}

}  // namespace

std::span<const Isa> supported_isas() noexcept {
  const IsaList& list = isa_list();
  return std::span(list.isas).first(list.count);
}

Isa best_isa() noexcept { return supported_isas().back(); }

}  // namespace castor
