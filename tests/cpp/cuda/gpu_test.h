#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "cuda/cuda_error.h"

namespace castor::testing {

/// A test that needs a GPU: without one it is skipped, or, where CASTOR_REQUIRE_CUDA is 1, fails.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0)
      return;
    const std::string reason =
        "no CUDA device: " + (error == cudaSuccess ? "0 found" : cuda::describe(error));
    const char* const required = std::getenv("CASTOR_REQUIRE_CUDA");
    if (required != nullptr && std::string(required) == "1")
      FAIL() << reason << " (CASTOR_REQUIRE_CUDA is 1)";
    GTEST_SKIP() << reason;
  }
};

/// Memory of the current device.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
    cuda::check(cudaMalloc(&data_, bytes > 0 ? bytes : 1), "cudaMalloc");
  }
  ~DeviceBuffer() { static_cast<void>(cudaFree(data_)); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  [[nodiscard]] std::span<std::byte> span() const { return {data(), bytes_}; }
  void write(std::span<const std::byte> from) {
    cuda::check(cudaMemcpy(data_, from.data(), from.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void read(std::span<std::byte> into) const {
    cuda::check(cudaMemcpy(into.data(), data_, into.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class ScopedStream {
 public:
  ScopedStream() {
    cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~ScopedStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  ScopedStream(const ScopedStream&) = delete;
  ScopedStream& operator=(const ScopedStream&) = delete;

  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void synchronize() { cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace castor::testing
