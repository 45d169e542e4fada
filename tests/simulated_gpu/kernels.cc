// castor's kernels on the simulated GPU: the bodies that the GPU runs, in a task of the stream.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "allocator.h"
#include "core/error.h"
#include "cuda/adam_kernel.h"
#include "cuda/element_kernel.h"
#include "cuda/host_kernels.h"
#include "cuda/mean_kernel.h"
#include "cuda/norm_kernel.h"
#include "optim/adam_check.h"

namespace castor::cuda {
namespace {

std::shared_ptr<simulated::Stream> queue(cudaStream_t stream) {
  return simulated::Gpu::instance().stream(reinterpret_cast<std::uintptr_t>(stream));
}

void check_address(const void* data, std::size_t bytes, const char* what) {
  if (data == nullptr || bytes == 0)
    return;
  if (!simulated::device_memory().contains(data) &&
      !simulated::Gpu::instance().is_registered(data)) {
    throw Error(std::string("a kernel of the simulated GPU was given ") + what +
                " that is neither in its memory nor page-locked");
  }
}

}  // namespace

void adam_update(std::span<const AdamSegment> segments, cudaStream_t stream) {
  ++simulated::counts().update_calls;
  for (const AdamSegment& segment : segments) {
    castor::detail::check_segment(segment);
    const std::size_t bytes = segment.numel * size_of(segment.type);
    check_address(segment.grad, bytes, "a gradient");
    check_address(segment.param, bytes, "a parameter");
    check_address(segment.master, segment.numel, "a master");
    check_address(segment.remainder, segment.numel, "a remainder");
    check_address(segment.exp_avg, segment.numel, "exp_avg");
    check_address(segment.exp_avg_sq, segment.numel, "exp_avg_sq");
    simulated::counts().update_numel += segment.numel;
    queue(stream)->enqueue([segment] { testing::adam_kernels_on_host(std::span(&segment, 1)); });
  }
}

template <typename Element>
void element_update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
                    cudaStream_t stream) {
  ++simulated::counts().update_calls;
  castor::detail::check_segments(rule, segments);
  for (const UpdateSegment& segment : segments) {
    const std::size_t bytes = segment.numel * size_of(segment.type);
    check_address(segment.grad, bytes, "a gradient");
    check_address(segment.param, bytes, "a parameter");
    check_address(segment.master, segment.numel, "a master");
    check_address(segment.remainder, segment.numel, "a remainder");
    check_address(segment.states[0], segment.numel, "a state");
    simulated::counts().update_numel += segment.numel;
  }
  queue(stream)->enqueue([split = rule.splits_masters(),
                          given = std::vector<UpdateSegment>(segments.begin(), segments.end())] {
    testing::element_kernels_on_host<Element>(split, given);
  });
}

template void element_update<LionElement>(const UpdateRule&, std::span<const UpdateSegment>,
                                          cudaStream_t);
template void element_update<SgdElement<false>>(const UpdateRule&, std::span<const UpdateSegment>,
                                                cudaStream_t);
template void element_update<SgdElement<true>>(const UpdateRule&, std::span<const UpdateSegment>,
                                               cudaStream_t);

void average(void* mean, const void* parts, std::size_t count, std::size_t numel, ScalarType type,
             cudaStream_t stream) {
  check_address(mean, numel * size_of(type), "a mean");
  check_address(parts, count * numel * size_of(type), "gradients");
  queue(stream)->enqueue([=] { testing::average_on_host(mean, parts, count, numel, type); });
}

std::size_t norm_workspace_doubles(std::span<const NormSegment> segments) noexcept {
  return workspace_of(segments);
}

void square_norms(std::span<const NormSegment> segments, double* sums, double* workspace,
                  cudaStream_t stream) {
  check_segments(segments);
  for (const NormSegment& segment : segments) {
    check_address(segment.data, segment.numel, "a tensor");
    simulated::counts().norm_numel += segment.numel;
  }
  check_address(sums, segments.size(), "sums");
  check_address(workspace, workspace_of(segments), "workspace");
  const auto is_empty = [](const NormSegment& segment) { return segment.numel == 0; };
  if (std::ranges::any_of(segments, is_empty))
    queue(stream)->enqueue([sums, count = segments.size()] { std::fill_n(sums, count, 0.0); });
  for (const NormBatch& batch : norm_batches(segments)) {
    simulated::counts().norm_launches += 2;
    queue(stream)->enqueue([batch, workspace] { testing::add_lanes_on_host(batch, workspace); });
    queue(stream)->enqueue(
        [batch, workspace, sums] { testing::add_blocks_on_host(batch, workspace, sums); });
    workspace += workspace_of(batch);
  }
}

}  // namespace castor::cuda
