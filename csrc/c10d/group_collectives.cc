#include "c10d/group_collectives.h"

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "c10d/group_backend.h"
#include "core/error.h"

namespace castor {
namespace {

constexpr int kPassed = 0;  // tag of messages; collectives have none

}  // namespace

GroupCollectives::GroupCollectives(const std::string& group, std::shared_ptr<RankWaits> waits)
    : backend_(host_backend(group)),
      place_(std::make_shared<RankPlace>(std::move(waits), rank(), size())) {}

RankPatience GroupCollectives::patience() const {
  return {.place = place_, .timeout = timeout_of(*backend_)};
}

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

void GroupCollectives::ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) {
  std::vector<at::Tensor> input = {tensor_over(sent)};
  std::vector<at::Tensor> output = {tensor_over(received)};
  const int own = backend_->getRank();
  const int ranks = backend_->getSize();
  complete([&] {
    auto receiving = backend_->recv(output, (own + ranks - 1) % ranks, kPassed);
    backend_->send(input, (own + 1) % ranks, kPassed)->wait();
    return receiving;
  });
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
    const RankWaits::Wait wait = place_->wait([] { return std::string("another rank"); });
    begin()->wait();
    place_->met();
  } catch (const std::exception& error) {
    throw lost_ranks(*this, without_places(error));
  }
}

}  // namespace castor
