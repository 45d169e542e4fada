#include "c10d/group_backend.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "core/error.h"
#include "torch/device_bytes.h"

namespace castor {

at::Tensor tensor_over(std::span<const std::byte> bytes) {
  return bytes_at(bytes.data(), bytes.size(), at::kCPU);
}

std::string without_places(const std::exception& error) {
  const std::string what = error.what();
  const std::string line = what.substr(0, what.find('\n'));
  const std::size_t end = line.starts_with("[/") ? line.find("] ") : std::string::npos;
  return end == std::string::npos ? line : line.substr(end + 2);
}

std::chrono::milliseconds timeout_of(c10d::Backend& backend) {
  return backend.getBackendOptions()->timeout;
}

std::vector<std::size_t> numbers_of(c10d::Backend& backend) {
  const auto& numbers = backend.getBackendOptions()->global_ranks_in_group;
  return {numbers.begin(), numbers.end()};
}

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception& error) {
    throw UsageError("there is no process group '" + name + "': " + without_places(error));
  }
}

c10::intrusive_ptr<c10d::Backend> backend_for(const std::string& group, c10::DeviceType type) {
  const c10::intrusive_ptr<c10d::ProcessGroup> found = process_group(group);
  try {
    return found->getBackend(type);
  } catch (const std::exception& error) {
    throw UsageError("the process group '" + group + "' cannot send memory of a device of type " +
                     c10::DeviceTypeName(type, /*lower_case=*/true) + ": " + without_places(error) +
                     "; make it with the backend \"cpu:gloo,cuda:nccl\"");
  }
}

c10::intrusive_ptr<c10d::Backend> host_backend(const std::string& group) {
  return backend_for(group, c10::DeviceType::CPU);
}

}  // namespace castor
