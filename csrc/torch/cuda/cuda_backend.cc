#include "torch/cuda/cuda_backend.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"
#include "cuda/cuda_error.h"
#include "cuda/event_clock.h"
#include "cuda/mean_kernel.h"
#include "cuda/norm_kernel.h"
#include "cuda/pinned_pages.h"
#include "cuda/scoped_device.h"
#include "cuda/stream_copy_engine.h"
#include "cuda/stream_order.h"
#include "cuda/update_kernels.h"
#include "host/host_arena.h"
#include "host/numa.h"
#include "torch/cuda/caching_arena.h"
#include "torch/cuda/torch_allocations.h"
#include "torch/device_bytes.h"
#include "torch/torch_device.h"

namespace castor {
namespace {

/// The node of host memory that the GPU is attached to; nullopt where the system does not say, or
/// all nodes are the same to castor.
std::optional<unsigned> numa_node_of(c10::DeviceIndex device) {
  std::array<char, 32> name{};
  cuda::check(cudaDeviceGetPCIBusId(name.data(), static_cast<int>(name.size()), device),
              "cudaDeviceGetPCIBusId");
  std::string bus_id(name.data());
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  int node = -1;
  std::ifstream("/sys/bus/pci/devices/" + bus_id + "/numa_node") >> node;
  if (node < 0 || !NumaTopology::available())
    return std::nullopt;
  const NumaTopology topology;
  const auto wanted = static_cast<unsigned>(node);
  const bool known = std::any_of(topology.nodes().begin(), topology.nodes().end(),
                                 [&](const NumaNode& n) { return n.os_index == wanted; });
  return known && topology.nodes().size() > 1 ? std::optional(wanted) : std::nullopt;
}

class EventFence final : public ComputeFence {
 public:
  EventFence(c10::DeviceIndex device, cudaStream_t stream) : device_(device) {
    const cuda::ScopedDevice current(device_);
    cuda::check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
    if (const cudaError_t error = cudaEventRecord(event_, stream); error != cudaSuccess) {
      static_cast<void>(cudaEventDestroy(event_));
      throw cuda::CudaError(error, "recording what the compute stream has been given");
    }
  }
  ~EventFence() override {
    static_cast<void>(cudaEventDestroy(event_));  // of any device; CUDA waits for its use by itself
  }
  EventFence(const EventFence&) = delete;
  EventFence& operator=(const EventFence&) = delete;

  void wait() override {
    const cuda::ScopedDevice current(device_);
    cuda::check(cudaEventSynchronize(event_), "waiting for the compute stream");
  }

 private:
  const c10::DeviceIndex device_;
  cudaEvent_t event_ = nullptr;
};

class CudaLane final : public DeviceLane {
 public:
  explicit CudaLane(c10::DeviceIndex device) : device_(device), copies_(device) {
    const cuda::ScopedDevice current(device_);
    cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CudaLane() override {
    const cuda::ScopedDevice current(device_);
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  [[nodiscard]] StreamId stream() const noexcept override { return cuda::stream_id(stream_); }
  [[nodiscard]] CopyEngine& copies() noexcept override { return copies_; }

 private:
  const c10::DeviceIndex device_;
  cudaStream_t stream_ = nullptr;
  cuda::StreamCopyEngine copies_;
};

class CudaBackend final : public DeviceBackend, public DeviceKernels {
 public:
  explicit CudaBackend(c10::DeviceIndex device) : device_(device) {}

  [[nodiscard]] DeviceId device() const noexcept override { return device_id(torch_device()); }
  [[nodiscard]] DeviceKernels* kernels() noexcept override { return this; }

  [[nodiscard]] StreamId current_stream() override {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_).stream();
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) {
      throw UsageError(
          "a boosted model was run, stepped or read, or had to make room, while a CUDA graph is "
          "captured (torch.cuda.graph, make_graphed_callables): castor moves weights between "
          "device and host, and the graph would replay the addresses of this one time. Capture "
          "what does not belong to the boosted model, within the memory that it leaves, or run it "
          "without a graph");
    }
    return cuda::stream_id(stream);
  }

  void order(StreamId first, StreamId then) override { cuda::order_streams(device_, first, then); }

  [[nodiscard]] std::shared_ptr<void> run_on(StreamId stream) override {
    return std::make_shared<c10::cuda::CUDAStreamGuard>(of_torch(stream));
  }

  [[nodiscard]] std::unique_ptr<CopyEngine> make_copy_engine() override {
    auto engine = std::make_unique<cuda::StreamCopyEngine>(device_);
    copies_ = engine.get();
    return engine;
  }

  [[nodiscard]] std::unique_ptr<CopyEngine> make_staging_engine() override {
    return std::make_unique<cuda::StreamCopyEngine>(device_);
  }

  [[nodiscard]] std::unique_ptr<DeviceLane> make_lane() override {
    return std::make_unique<CudaLane>(device_);
  }

  [[nodiscard]] std::unique_ptr<Arena> make_device_arena() override {
    return std::make_unique<CachingArena>(device_);
  }

  [[nodiscard]] std::unique_ptr<Arena> make_host_arena() override {
    return castor::make_host_arena(
        {.numa_node = numa_node_of(device_),
         .adapt_pages = [device = device_](std::unique_ptr<PageSource> pages) {
           return std::make_unique<cuda::PinnedPages>(std::move(pages), device);
         }});
  }

  [[nodiscard]] std::shared_ptr<void> lock_pages(std::span<std::byte> pages) override {
    return cuda::lock_pages(pages, device_);
  }

  void follow(const std::shared_ptr<DeviceAccount>& account) override {
    follow_torch_allocations(device_, account);
  }
  [[nodiscard]] std::size_t allocated_for(std::size_t bytes) const noexcept override {
    return castor::allocated_for(bytes);
  }

  [[nodiscard]] bool has(std::string_view rule) const noexcept override {
    return cuda::has_kernels(rule);
  }

  void update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
              StreamId stream) override {
    const c10::cuda::CUDAGuard guard(device_);
    cuda::update(rule, segments, cuda::handle_of(stream));
  }

  void square_norms(std::span<const NormSegment> segments, std::span<double> sums,
                    StreamId stream) override {
    const at::NoGradGuard no_grad;
    const c10::cuda::CUDAStreamGuard current(of_torch(stream));
    const auto options = at::TensorOptions().dtype(at::kDouble).device(torch_device());
    const auto count = static_cast<std::int64_t>(cuda::norm_workspace_doubles(segments));
    const at::Tensor workspace = at::empty({count}, options);
    const at::Tensor result = at::empty({static_cast<std::int64_t>(segments.size())}, options);
    cuda::square_norms(segments, result.data_ptr<double>(), workspace.data_ptr<double>(),
                       cuda::handle_of(stream));
    const at::Tensor host = result.cpu();  // waits
    std::copy_n(host.const_data_ptr<double>(), sums.size(), sums.begin());
  }

  void average(void* mean, const void* parts, std::size_t count, std::size_t numel, ScalarType type,
               StreamId stream) override {
    const c10::cuda::CUDAGuard guard(device_);
    cuda::average(mean, parts, count, numel, type, cuda::handle_of(stream));
  }

  void copy_from_device(std::span<const std::byte> source, std::byte* target) override {
    const at::NoGradGuard no_grad;
    bytes_at(target, source.size(), c10::kCPU)
        .copy_(bytes_at(source.data(), source.size(), torch_device()));
  }
  void copy_to_device(std::span<const std::byte> source, std::byte* target) override {
    const at::NoGradGuard no_grad;
    bytes_at(target, source.size(), torch_device())
        .copy_(bytes_at(source.data(), source.size(), c10::kCPU));
  }

  [[nodiscard]] std::unique_ptr<DeviceClock> make_clock() override {
    return std::make_unique<cuda::EventClock>(device_);
  }

  [[nodiscard]] std::unique_ptr<ComputeFence> fence(StreamId stream) override {
    return std::make_unique<EventFence>(device_, cuda::handle_of(stream));
  }

  void host_writes(std::span<const std::byte> host) override { copies_->synchronize_readers(host); }

 private:
  [[nodiscard]] c10::Device torch_device() const noexcept { return {c10::kCUDA, device_}; }
  /// It may be of torch's pool, or anybody's.
  [[nodiscard]] c10::cuda::CUDAStream of_torch(StreamId stream) const {
    return c10::cuda::getStreamFromExternal(cuda::handle_of(stream), device_);
  }

  const c10::DeviceIndex device_;
  cuda::StreamCopyEngine* copies_ = nullptr;  // the session's, which uses this no longer than that
};

}  // namespace

std::shared_ptr<DeviceBackend> make_cuda_backend(c10::DeviceIndex device) {
  if (const int count = c10::cuda::device_count(); device < 0 || device >= count) {
    throw InvalidArgument("there is no CUDA device " + std::to_string(device) + "; torch sees " +
                          std::to_string(count));
  }
  return std::make_shared<CudaBackend>(device);
}

}  // namespace castor
