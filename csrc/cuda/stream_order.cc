#include "cuda/stream_order.h"

#include "cuda/cuda_error.h"
#include "cuda/scoped_device.h"

namespace castor::cuda {

void order_streams(int device, StreamId first, StreamId then) {
  if (first == then)
    return;
  const ScopedDevice current(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  cudaError_t error = cudaEventRecord(event, handle_of(first));
  if (error == cudaSuccess)
    error = cudaStreamWaitEvent(handle_of(then), event, 0);
  static_cast<void>(cudaEventDestroy(event));  // CUDA keeps it until its use is over
  check(error, "ordering one stream behind another");
}

}  // namespace castor::cuda
