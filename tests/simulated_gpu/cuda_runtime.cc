#include <cuda_runtime_api.h>

#include <cstring>

#include "allocator.h"
#include "gpu.h"

using castor::simulated::Gpu;
using castor::simulated::Moment;
using castor::simulated::TimeStamp;

struct CUevent_st {
  bool timed = false;
  Moment moment;
  std::shared_ptr<const TimeStamp> time;  // of the latest record, if it is timed
};

namespace {

std::uint64_t id_of(cudaStream_t stream) { return reinterpret_cast<std::uintptr_t>(stream); }

cudaError_t state() { return Gpu::instance().error().failed() ? cudaErrorAssert : cudaSuccess; }

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorUnknown: break;
  }
  return "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t error) {
  thread_local std::string text;
  text = "on the simulated GPU";
  if (error == cudaErrorAssert)
    text += ": " + Gpu::instance().error().message().value_or("reset since");
  return text.c_str();
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

cudaError_t cudaDeviceGetPCIBusId(char* name, int bytes, int /*device*/) {
  std::strncpy(name, "simulated", static_cast<std::size_t>(bytes));
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  const auto& memory = castor::simulated::device_memory();
  *total = memory.capacity();
  *available = memory.available();
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  ++castor::simulated::counts().host_waits;
  Gpu::instance().synchronize();
  return state();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = Gpu::instance().capturing() == static_cast<std::int64_t>(id_of(stream))
                ? cudaStreamCaptureStatusActive
                : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = reinterpret_cast<cudaStream_t>(
      static_cast<std::uintptr_t>(Gpu::instance().new_stream()->id()));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr)
    return cudaErrorInvalidValue;
  Gpu::instance().remove_stream(id_of(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++castor::simulated::counts().host_waits;
  Gpu::instance().stream(id_of(stream))->synchronize();
  return state();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!Moment(Gpu::instance().stream(id_of(stream))).past())
    return cudaErrorNotReady;
  return state();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  event->moment.block(*Gpu::instance().stream(id_of(stream)));
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st{.timed = (flags & cudaEventDisableTiming) == 0, .moment = {}, .time = {}};
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;  // who waits for it has its moment
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto queue = Gpu::instance().stream(id_of(stream));
  if (event->timed)
    event->time = castor::simulated::stamp(*queue);
  event->moment = Moment(queue);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->time || !end->time)
    return cudaErrorInvalidResourceHandle;
  if (!start->moment.past() || !end->moment.past())
    return cudaErrorNotReady;
  *milliseconds = castor::simulated::milliseconds(*start->time, *end->time);
  return state();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->moment.past() ? state() : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++castor::simulated::counts().host_waits;
  ++castor::simulated::counts().fences;
  const Moment moment = event->moment;
  moment.wait();
  return state();
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  auto& counts = castor::simulated::counts();
  ++(kind == cudaMemcpyHostToDevice ? counts.copies_in : counts.copies_out);
  (kind == cudaMemcpyHostToDevice ? counts.bytes_in : counts.bytes_out) += bytes;
  Gpu::instance().stream(id_of(stream))->enqueue([=] { std::memcpy(target, source, bytes); });
  return state();
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  *attributes = {};
  if (castor::simulated::device_memory().contains(data)) {
    attributes->type = cudaMemoryTypeDevice;
  } else if (Gpu::instance().is_registered(data)) {
    attributes->type = cudaMemoryTypeHost;
  }
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned /*flags*/) {
  if (castor::simulated::refusals().pages.now())
    return cudaErrorMemoryAllocation;
  switch (Gpu::instance().register_host(static_cast<const std::byte*>(data), bytes)) {
    case Gpu::Registered::kYes: ++castor::simulated::counts().registrations; return cudaSuccess;
    case Gpu::Registered::kAlready: return cudaErrorHostMemoryAlreadyRegistered;
    case Gpu::Registered::kBeyondLimit: break;
  }
  return cudaErrorMemoryAllocation;
}

cudaError_t cudaHostUnregister(void* data) {
  return Gpu::instance().unregister_host(static_cast<const std::byte*>(data))
             ? cudaSuccess
             : cudaErrorHostMemoryNotRegistered;
}
