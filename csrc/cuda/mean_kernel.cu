#include "cuda/mean_kernel.h"

#include <algorithm>
#include <limits>

#include "cuda/launch.h"
#include "cuda/mean_body.h"

namespace castor::cuda {
namespace {

constexpr unsigned kMeanThreads = 256;

template <ScalarType type>
__global__ __launch_bounds__(kMeanThreads) void average_parts(MeanOfParts<type> parts) {
  const std::size_t step = std::size_t{gridDim.x} * kMeanThreads;
  for (std::size_t i = std::size_t{blockIdx.x} * kMeanThreads + threadIdx.x; i < parts.numel;
       i += step)
    parts.run(i);
}

}  // namespace

void average(void* mean, const void* parts, std::size_t count, std::size_t numel, ScalarType type,
             cudaStream_t stream) {
  constexpr std::size_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();
  for_mean_of(mean, parts, count, numel, type, [&]<ScalarType kType>(MeanOfParts<kType> of) {
    const std::size_t num_blocks = (numel + kMeanThreads - 1) / kMeanThreads;
    if (num_blocks > 0) {
      launch("the kernel of means", &average_parts<kType>,
             static_cast<unsigned>(std::min(num_blocks, kMaxBlocks)), kMeanThreads, stream, of);
    }
  });
}

}  // namespace castor::cuda
