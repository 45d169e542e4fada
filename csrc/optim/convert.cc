#include "optim/convert.h"

#include "optim/dispatch.h"
#include "optim/for_each_task.h"
#include "optim/rounding.h"

namespace castor {
namespace {

template <ScalarType type>
struct RoundLoop {
  using Codec = ScalarCodec<type>;
  typename Codec::Storage* __restrict param;
  const float* __restrict master;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    for (std::size_t i = 0; i < count; ++i)
      param[i] = Codec::round(master[i]);
  }
};

template <ScalarType type>
struct WidenLoop {
  using Codec = ScalarCodec<type>;
  float* __restrict master;
  const typename Codec::Storage* __restrict param;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    for (std::size_t i = 0; i < count; ++i)
      master[i] = Codec::load(param[i]);
  }
};

template <ScalarType type>
void round_all(Executor* executor, void* param, const float* master, std::size_t numel) {
  auto* const out = static_cast<typename ScalarCodec<type>::Storage*>(param);
  detail::for_each_task(executor, numel, [=](std::size_t begin, std::size_t count) {
    detail::run_on(best_isa(), RoundLoop<type>{out + begin, master + begin, count});
  });
}

template <ScalarType type>
void widen_all(Executor* executor, float* master, const void* param, std::size_t numel) {
  const auto* const in = static_cast<const typename ScalarCodec<type>::Storage*>(param);
  detail::for_each_task(executor, numel, [=](std::size_t begin, std::size_t count) {
    detail::run_on(best_isa(), WidenLoop<type>{master + begin, in + begin, count});
  });
}

}  // namespace

void master_to_param(Executor* executor, void* param, const float* master, std::size_t numel,
                     ScalarType type) {
  switch (type) {
    case ScalarType::kFloat32:
      return round_all<ScalarType::kFloat32>(executor, param, master, numel);
    case ScalarType::kBFloat16:
      return round_all<ScalarType::kBFloat16>(executor, param, master, numel);
    case ScalarType::kFloat16:
      return round_all<ScalarType::kFloat16>(executor, param, master, numel);
    case ScalarType::kUInt8: throw_no_arithmetic(type);
  }
}

void param_to_master(Executor* executor, float* master, const void* param, std::size_t numel,
                     ScalarType type) {
  switch (type) {
    case ScalarType::kFloat32:
      return widen_all<ScalarType::kFloat32>(executor, master, param, numel);
    case ScalarType::kBFloat16:
      return widen_all<ScalarType::kBFloat16>(executor, master, param, numel);
    case ScalarType::kFloat16:
      return widen_all<ScalarType::kFloat16>(executor, master, param, numel);
    case ScalarType::kUInt8: throw_no_arithmetic(type);
  }
}

}  // namespace castor
