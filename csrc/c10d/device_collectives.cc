#include "c10d/device_collectives.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <utility>

#include "c10d/group_backend.h"
#include "core/error.h"

namespace castor {
namespace {

/// Up to this size all ranks send all they have: one message more costs more than the bytes.
constexpr std::int64_t kGatheredBytes = std::int64_t{64} << 10;
/// Calls of look(). What a rank that has ended had given to its device may still complete.
constexpr int kLooksUntilEnded = 3;
constexpr int kLooksUntilStopped = 15;

/// Returns the sum of the rows, one after the other.
at::Tensor sum_of(const at::Tensor& rows) {
  const at::ScalarType type = rows.scalar_type();
  const bool rounded = type == at::kHalf || type == at::kBFloat16;
  at::Tensor total = rows[0].to(rounded ? at::kFloat : type, /*non_blocking=*/false, /*copy=*/true);
  for (std::int64_t row = 1; row < rows.size(0); ++row) {
    total.add_(rows[row]);
  }
  return total.to(type);
}

c10d::ReduceOp operation_of(DeviceCollectives::Result result) {
  return result == DeviceCollectives::Result::kMean ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
}

}  // namespace

void DeviceWork::wait() {
  if (work_) {
    work_->wait();
    return;
  }
  const c10::Device device = end_->device();
  end_->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  values_.reset();
}

DeviceCollectives::DeviceCollectives(std::shared_ptr<DeviceConnection> connection,
                                     c10::Device device, const Collectives& host,
                                     Reduction reduction)
    : connection_(std::move(connection)),
      device_(device),
      host_(host),
      reduction_(reduction),
      beside_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

// The tensor's elements, which it shares.
at::Tensor DeviceCollectives::flat_of(const at::Tensor& tensor) const {
  if (!tensor.is_contiguous()) {
    throw InvalidArgument("ranks exchange contiguous tensors");
  }
  if (tensor.device() != device_) {
    throw InvalidArgument("a tensor on " + tensor.device().str() +
                          " goes to other ranks, and this rank computes on " + device_.str() +
                          ": move it there");
  }
  return tensor.detach().view({-1});
}

void DeviceCollectives::all_reduce(const at::Tensor& values, Result result) {
  const at::NoGradGuard no_grad;
  const auto ranks = static_cast<std::int64_t>(host_.size());
  const at::Tensor flat = flat_of(values);
  if (flat.numel() == 0) {
    return;
  }
  if (reduction_ == Reduction::kBackend) {
    std::vector<at::Tensor> tensors = {flat};
    c10d::AllreduceOptions options;
    options.reduceOp = operation_of(result);
    begin([&] { return connection_->backend().allreduce(tensors, options); })->wait();
    return;
  }
  if (result == Result::kMean) {
    throw InvalidArgument("ordered collectives add tensors up, and give no mean");
  }
  if (static_cast<std::int64_t>(flat.nbytes()) <= kGatheredBytes) {
    const at::Tensor all = at::empty({ranks, flat.numel()}, flat.options());
    gather(flat, all);
    flat.copy_(sum_of(all));
    return;
  }
  const std::int64_t shard = (flat.numel() + ranks - 1) / ranks;
  const std::int64_t padding = shard * ranks - flat.numel();
  const at::Tensor padded = padding == 0 ? flat : at::constant_pad_nd(flat, {0, padding});
  const at::Tensor received = at::empty({ranks, shard}, flat.options());
  exchange(padded, received);
  gather(sum_of(received), padded);
  if (padding != 0) {
    flat.copy_(padded.narrow(0, 0, flat.numel()));
  }
}

DeviceWork DeviceCollectives::begin_all_reduce(const at::Tensor& values) {
  const c10::impl::VirtualGuardImpl device(device_.type());
  c10::Event given(device_.type());
  given.record(device.getStream(device_));
  given.block(beside_);
  if (values.numel() > 0) {
    values.record_stream(beside_);  // nobody may wait, where an exception comes between
  }
  const c10::StreamGuard on(beside_);
  all_reduce(values);
  c10::Event end(device_.type());
  end.record(beside_);
  return {std::move(end), values};
}

void DeviceCollectives::reduce_scatter(const at::Tensor& values, const at::Tensor& into,
                                       Result result) {
  const at::NoGradGuard no_grad;
  at::Tensor input = flat_of(values);
  at::Tensor output = flat_of(into);
  if (reduction_ != Reduction::kBackend) {
    throw InvalidArgument("ordered sums are made by the caller, of tensors from all_to_all");
  }
  if (input.numel() != output.numel() * static_cast<std::int64_t>(host_.size())) {
    throw InvalidArgument(
        "a reduce-scatter takes a shard for each rank, each as large as the "
        "result: it was given " +
        std::to_string(input.numel()) + " elements for a result of " +
        std::to_string(output.numel()));
  }
  if (output.numel() == 0) {
    return;
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = operation_of(result);
  begin([&] {
    return connection_->backend()._reduce_scatter_base(output, input, options);
  })->wait();
}

void DeviceCollectives::all_gather(const at::Tensor& own, const at::Tensor& into) {
  const at::NoGradGuard no_grad;
  gather(own, into);
}

void DeviceCollectives::all_to_all(const at::Tensor& sent, const at::Tensor& into) {
  const at::NoGradGuard no_grad;
  exchange(sent, into);
}

DeviceWork DeviceCollectives::begin_ring_shift(const at::Tensor& sent, const at::Tensor& into) {
  const at::NoGradGuard no_grad;
  at::Tensor input = bytes_of(sent);
  at::Tensor output = bytes_of(into);
  const std::size_t ranks = host_.size();
  std::vector<std::int64_t> to(ranks, 0);
  std::vector<std::int64_t> from(ranks, 0);
  to[(host_.rank() + 1) % ranks] = input.numel();
  from[(host_.rank() + ranks - 1) % ranks] = output.numel();
  return DeviceWork(
      begin([&] { return connection_->backend().alltoall_base(output, input, from, to); }));
}

void DeviceCollectives::gather(at::Tensor own, at::Tensor into) {
  at::Tensor input = bytes_of(own);
  at::Tensor output = bytes_of(into);
  begin([&] { return connection_->backend()._allgather_base(output, input); })->wait();
}

void DeviceCollectives::exchange(at::Tensor sent, at::Tensor into) {
  at::Tensor input = bytes_of(sent);
  at::Tensor output = bytes_of(into);
  std::vector<std::int64_t> equal;
  begin([&] { return connection_->backend().alltoall_base(output, input, equal, equal); })->wait();
}

void DeviceCollectives::check() const {
  if (const std::string why = aborted(); !why.empty()) {
    throw lost_ranks(host_, why);
  }
}

template <typename Begin>
c10::intrusive_ptr<c10d::Work> DeviceCollectives::begin(const Begin& start) {
  check();
  try {
    c10::intrusive_ptr<c10d::Work> work = start();
    const MutexLock lock(mutex_);
    last_ = work;
    return work;
  } catch (const std::exception& error) {
    const std::string why = aborted();
    throw lost_ranks(host_, why.empty() ? backend() + ": " + without_places(error) : why);
  }
}

void DeviceCollectives::expect_messages(bool expected) {
  const MutexLock lock(mutex_);
  expecting_ = expected;
}

void DeviceCollectives::look() noexcept {
  try {
    const LostRank lost = host_.find_lost();
    {
      const MutexLock lock(mutex_);
      if (last_ && last_->isCompleted()) {
        last_.reset();
      }
      if (lost.why.empty() || !aborted().empty() || !(expecting_ || last_)) {
        looks_ = 0;
        return;
      }
      if (++looks_ < (lost.may_return ? kLooksUntilStopped : kLooksUntilEnded)) {
        return;
      }
    }
    abort(lost.why);
  } catch (const std::exception& error) {
    abort(without_places(error));
  }
}

}  // namespace castor
