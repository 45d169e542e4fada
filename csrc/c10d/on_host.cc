#include "c10d/on_host.h"

#include <ATen/ATen.h>

#include "core/error.h"

namespace castor {

OnHost::OnHost(const at::Tensor& tensor) : tensor_(tensor.detach()) {
  if (!tensor.is_contiguous()) {
    throw InvalidArgument("ranks exchange contiguous tensors");
  }
  host_ = tensor_.is_cpu()
              ? tensor_
              : at::empty(tensor_.sizes(), tensor_.options().device(at::kCPU).pinned_memory(true));
}

OnHost OnHost::values_of(const at::Tensor& tensor) {
  OnHost values(tensor);
  if (!values.tensor_.is_cpu()) {
    values.host_.copy_(values.tensor_, /*non_blocking=*/false);
  }
  return values;
}

OnHost OnHost::room_for(const at::Tensor& tensor) { return OnHost(tensor); }

std::span<std::byte> OnHost::bytes() const {
  return {static_cast<std::byte*>(host_.data_ptr()), host_.nbytes()};
}

void OnHost::send() const {
  if (!tensor_.is_cpu()) {
    // torch gives page-locked memory to nobody else before the stream has read it.
    tensor_.copy_(host_, /*non_blocking=*/true);
  }
}

}  // namespace castor
