#include "dist/group_collectives.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "core/error.h"
#include "torch/chunk_storages.h"

namespace castor {
namespace {

at::Tensor tensor_over(std::span<const std::byte> bytes) {
  return bytes_at(bytes.data(), bytes.size(), at::kCPU);
}

/// What torch and gloo say, without where in their sources: "[/path/pair.cc:547] " and what follows
/// the first line.
std::string without_places(const std::exception& error) {
  const std::string what = error.what();
  const std::string line = what.substr(0, what.find('\n'));
  const std::size_t end = line.starts_with("[/") ? line.find("] ") : std::string::npos;
  return end == std::string::npos ? line : line.substr(end + 2);
}

// The backend itself is called, not torch's operators: those are seen by whatever watches a user's.
c10::intrusive_ptr<c10d::Backend> host_backend(const std::string& group) {
  try {
    return c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& error) {
    throw UsageError("the process group '" + group +
                     "' cannot be used for memory of the host: " + without_places(error) +
                     "; make it with the backend \"gloo\", or \"cpu:gloo,cuda:nccl\"");
  }
}

}  // namespace

GroupCollectives::GroupCollectives(const std::string& group) : backend_(host_backend(group)) {}

std::size_t GroupCollectives::rank() const noexcept {
  return static_cast<std::size_t>(backend_->getRank());
}

std::size_t GroupCollectives::size() const noexcept {
  return static_cast<std::size_t>(backend_->getSize());
}

std::string GroupCollectives::description() const { return backend_->getBackendName(); }

void GroupCollectives::all_gather(std::span<const std::byte> own, std::span<std::byte> all) {
  at::Tensor input = tensor_over(own);
  at::Tensor output = tensor_over(all);
  complete([&] { return backend_->_allgather_base(output, input); });
}

void GroupCollectives::all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) {
  at::Tensor input = tensor_over(sent);
  at::Tensor output = tensor_over(received);
  std::vector<std::int64_t> equal;
  complete([&] { return backend_->alltoall_base(output, input, equal, equal); });
}

void GroupCollectives::broadcast(std::span<std::byte> values) {
  std::vector<at::Tensor> tensors = {tensor_over(values)};
  complete([&] { return backend_->broadcast(tensors); });
}

template <typename Begin>
void GroupCollectives::complete(const Begin& begin) {
  try {
    if (left_) {
      throw Error("it has let go of the model itself");
    }
    begin()->wait();
  } catch (const std::exception& error) {
    throw lost_ranks(*this, without_places(error));
  }
}

}  // namespace castor
