#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstddef>
#include <exception>
#include <span>
#include <string>
#include <vector>

namespace castor {

/// Returns a process group of torch.distributed, given by its name. Throws UsageError where there
/// is none.
[[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> process_group(const std::string& name);
/// Returns the backend that moves host memory in such a group. castor calls the backend itself and
/// not torch's operators, which tools that watch the user's operators would see. Throws UsageError
/// where there is no such group, or no such backend.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> host_backend(const std::string& group);
/// Same, but returns the backend that moves memory of devices of a type.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> backend_for(const std::string& group,
                                                            c10::DeviceType type);

/// Returns how long the backend's calls wait for other ranks: see torch.distributed.new_group.
[[nodiscard]] std::chrono::milliseconds timeout_of(c10d::Backend& backend);

/// Returns the numbers that the group's ranks have in the run, in their order; empty: 0, 1, 2, ...
[[nodiscard]] std::vector<std::size_t> numbers_of(c10d::Backend& backend);

/// Returns a tensor that borrows the bytes.
[[nodiscard]] at::Tensor tensor_over(std::span<const std::byte> bytes);

/// Returns the message of an error of torch or gloo without places in their sources: without
/// "[/path/pair.cc:547] ", and without the lines behind the first.
[[nodiscard]] std::string without_places(const std::exception& error);

}  // namespace castor
