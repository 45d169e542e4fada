#include "cuda/element_kernel.h"

#include "cuda/element_body.h"
#include "cuda/launch.h"
#include "cuda/tile_kernel.h"
#include "optim/element_check.h"
#include "optim/lion_element.h"
#include "optim/sgd_element.h"

namespace castor::cuda {

template <typename Element>
void element_update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
                    cudaStream_t stream) {
  castor::detail::check_segments(rule, segments);
  for_each_element_batch<Element>(rule.splits_masters(), segments,
                                  [stream]<typename Body>(const auto& batch) {
                                    launch("the kernel of an update rule", &update_elements<Body>,
                                           batch.num_tiles, kTileThreads, stream, batch);
                                  });
}

template void element_update<LionElement>(const UpdateRule&, std::span<const UpdateSegment>,
                                          cudaStream_t);
template void element_update<SgdElement<false>>(const UpdateRule&, std::span<const UpdateSegment>,
                                                cudaStream_t);
template void element_update<SgdElement<true>>(const UpdateRule&, std::span<const UpdateSegment>,
                                               cudaStream_t);

}  // namespace castor::cuda
