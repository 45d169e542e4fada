#include "dist/group_collectives.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <atomic>
#include <exception>
#include <string>
#include <utility>
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
class GroupCollectives final : public Collectives {
 public:
  explicit GroupCollectives(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  [[nodiscard]] std::size_t rank() const noexcept override {
    return static_cast<std::size_t>(backend_->getRank());
  }
  [[nodiscard]] std::size_t size() const noexcept override {
    return static_cast<std::size_t>(backend_->getSize());
  }

  [[nodiscard]] std::string description() const override { return backend_->getBackendName(); }

  void all_gather(std::span<const std::byte> own, std::span<std::byte> all) override {
    at::Tensor input = tensor_over(own);
    at::Tensor output = tensor_over(all);
    complete([&] { return backend_->_allgather_base(output, input); });
  }

  void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) override {
    at::Tensor input = tensor_over(sent);
    at::Tensor output = tensor_over(received);
    std::vector<std::int64_t> equal;
    complete([&] { return backend_->alltoall_base(output, input, equal, equal); });
  }

  // gloo has no way to break a connection but to end: others hear of it then, or at their timeout.
  void leave() noexcept override { left_ = true; }

 private:
  template <typename Begin>
  void complete(const Begin& begin) {
    try {
      if (left_) {
        throw Error("it has let go of the model itself");
      }
      begin()->wait();
    } catch (const std::exception& error) {
      throw lost_ranks(*this, without_places(error));
    }
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> left_ = false;
};

}  // namespace

std::shared_ptr<Collectives> group_collectives(const std::string& group) {
  try {
    return std::make_shared<GroupCollectives>(
        c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CPU));
  } catch (const std::exception& error) {
    throw UsageError("the process group '" + group +
                     "' cannot be used for memory of the host: " + without_places(error) +
                     "; make it with the backend \"gloo\", or \"cpu:gloo,cuda:nccl\"");
  }
}

}  // namespace castor
