#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstddef>
#include <exception>
#include <span>
#include <string>

namespace castor {

/// Of a process group of torch.distributed, by its name: what moves memory of the host. The backend
/// itself is called, not torch's operators: those are seen by whatever watches a user's. Throws
/// UsageError where there is no such group, or no such backend.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> host_backend(const std::string& group);

/// How long its calls wait for other ranks: see torch.distributed.new_group.
[[nodiscard]] std::chrono::milliseconds timeout_of(c10d::Backend& backend);

/// A tensor that borrows the bytes.
[[nodiscard]] at::Tensor tensor_over(std::span<const std::byte> bytes);

/// What torch and gloo say, without where in their sources: "[/path/pair.cc:547] " and what follows
/// the first line.
[[nodiscard]] std::string without_places(const std::exception& error);

}  // namespace castor
