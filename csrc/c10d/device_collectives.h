#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c10d/device_group.h"
#include "core/collectives.h"
#include "core/device_reduction.h"
#include "core/mutex.h"

namespace castor {

/// A tensor that ranks are passing on or adding up, on another stream than the caller's.
class DeviceWork {
 public:
  explicit DeviceWork(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  /// Takes the end of the work on another stream, and the tensor that it writes.
  DeviceWork(c10::Event end, at::Tensor values)
      : end_(std::move(end)), values_(std::move(values)) {}
  /// Orders the calling thread's current stream behind the work. The host does not wait.
  void wait();

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::optional<c10::Event> end_;
  at::Tensor values_;
};

/// Collectives of tensors on devices, over a process group whose backend sends device memory: NCCL.
///
/// A call orders its work behind the calling thread's current stream, and later work of that stream
/// behind its own; the host does not wait. Ordered sums are in rank order, in fp32 for 16-bit
/// types, and rounded once: they have the bits of the host's (RankSums). The backend's own sums
/// take less memory, and have its order and rounding. All ranks make the same calls in the same
/// order. Tensors are contiguous.
///
/// The kernels of a collective wait for every rank, for ever. Therefore look() aborts the backend
/// when a rank is lost while work is under way. The streams then go on with undefined values, the
/// host's fences return, and every later call throws Error, which names the lost rank.
///
/// One thread at a time makes collectives; look() and abort() may be called from any thread.
class DeviceCollectives {
 public:
  /// Takes the connection of a process group for the device, and collectives of the same ranks
  /// through the host, which outlive this.
  DeviceCollectives(std::shared_ptr<DeviceConnection> connection, c10::Device device,
                    const Collectives& host, Reduction reduction);

  /// Returns the backend's name: "nccl".
  [[nodiscard]] std::string backend() const { return connection_->backend().getBackendName(); }
  /// Whether the tensor is on a device of these ranks.
  [[nodiscard]] bool takes(const at::Tensor& tensor) const noexcept {
    return tensor.device().type() == device_.type();
  }

  /// Returns who adds up.
  [[nodiscard]] Reduction reduction() const noexcept { return reduction_; }

  // All throw InvalidArgument if a tensor is on another device than this rank's.
  /// Whether ranks want the sum of their values or the mean.
  enum class Result : std::uint8_t { kSum, kMean };
  /// Replaces the values by their sum over the ranks. The mean requires Reduction::kBackend.
  void all_reduce(const at::Tensor& values, Result result = Result::kSum);
  /// Begins the same on a stream of this object's own. The caller's stream goes on, and is given no
  /// work with the values before DeviceWork::wait().
  [[nodiscard]] DeviceWork begin_all_reduce(const at::Tensor& values);
  /// Fills `into` with the result of this rank's shard of `values`, which has one for each rank.
  /// The backend adds. Requires Reduction::kBackend.
  void reduce_scatter(const at::Tensor& values, const at::Tensor& into, Result result);
  /// See Collectives; of tensors' bytes.
  void all_gather(const at::Tensor& own, const at::Tensor& into);
  void all_to_all(const at::Tensor& sent, const at::Tensor& into);
  [[nodiscard]] DeviceWork begin_ring_shift(const at::Tensor& sent, const at::Tensor& into);

  /// Says whether the ranks exchange tensors through the process group without this object, as
  /// pipeline stages do: look() then takes work to be under way.
  void expect_messages(bool expected);
  /// Aborts the backend if a rank has been lost, and work is under way, for several calls of this
  /// function. The unit is calls, about one a second, because no call passes while this process is
  /// stopped.
  void look() noexcept;
  /// See DeviceConnection.
  void abort(const std::string& why) noexcept { connection_->abort(why); }
  [[nodiscard]] std::string aborted() const { return connection_->aborted(); }
  /// Throws Error if the backend has been aborted: what was received since is undefined.
  void check() const;

 private:
  template <typename Begin>
  c10::intrusive_ptr<c10d::Work> begin(const Begin& start);
  [[nodiscard]] at::Tensor flat_of(const at::Tensor& tensor) const;
  [[nodiscard]] at::Tensor bytes_of(const at::Tensor& tensor) const {
    return flat_of(tensor).view(at::kByte);
  }
  void gather(at::Tensor own, at::Tensor into);
  void exchange(at::Tensor sent, at::Tensor into);

  const std::shared_ptr<DeviceConnection> connection_;
  const c10::Device device_;
  const Collectives& host_;
  const Reduction reduction_;
  const c10::Stream beside_;  // of begin_all_reduce
  mutable Mutex mutex_;
  c10::intrusive_ptr<c10d::Work> last_ CASTOR_GUARDED_BY(mutex_);  // it keeps its tensors alive
  bool expecting_ CASTOR_GUARDED_BY(mutex_) = false;
  int looks_ CASTOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace castor
