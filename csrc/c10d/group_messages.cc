#include "c10d/group_messages.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "c10d/group_backend.h"
#include "core/error.h"

namespace castor {
namespace {

/// Nobody may ask for anything for days, and where a wait of gloo's times out, all of its group
/// fails.
constexpr std::chrono::hours kAsLongAsItTakes{24 * 365};

class Message final : public RankMessage {
 public:
  Message(c10::intrusive_ptr<c10d::Work> work, std::size_t other, std::shared_ptr<RankPlace> place)
      : work_(std::move(work)), other_(other), place_(std::move(place)) {}

  void wait() override {
    bool done = false;
    std::string lost;
    try {
      const auto abort = [&](const std::string& why) {
        lost = why;
        stop();
      };
      const auto other = [this] { return place_->name_of(other_); };
      const RankWaits::Wait wait = place_->wait(other, abort);
      done = work_->wait();
    } catch (const std::exception& error) {
      throw Error(place_->explain(other_, without_places(error)));
    }
    if (!done) {
      throw Error(lost.empty() ? "it has let go of the model" : lost);
    }
  }
  void stop() noexcept override {
    try {
      work_->abort();
    } catch (...) {  // NOLINT(bugprone-empty-catch): it has ended
    }
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::size_t other_;
  const std::shared_ptr<RankPlace> place_;
};

template <typename Begin>
std::unique_ptr<RankMessage> begin(Mutex& mutex, std::size_t other,
                                   const std::shared_ptr<RankPlace>& place, const Begin& start) {
  try {
    const MutexLock lock(mutex);
    return std::make_unique<Message>(start(), other, place);
  } catch (const std::exception& error) {
    throw Error(without_places(error));
  }
}

}  // namespace

GroupMessages::GroupMessages(const std::string& group, std::shared_ptr<RankPlace> place)
    : backend_(host_backend(group)), place_(std::move(place)) {}

std::size_t GroupMessages::rank() const noexcept {
  return static_cast<std::size_t>(backend_->getRank());
}

std::size_t GroupMessages::size() const noexcept {
  return static_cast<std::size_t>(backend_->getSize());
}

std::unique_ptr<RankMessage> GroupMessages::send(std::size_t to, std::uint32_t tag,
                                                 std::span<const std::byte> bytes) {
  std::vector<at::Tensor> tensors = {tensor_over(bytes)};
  return begin(mutex_, to, place_, [&] {
    return backend_->send(tensors, static_cast<int>(to), static_cast<int>(tag));
  });
}

std::unique_ptr<RankMessage> GroupMessages::receive(std::size_t from, std::uint32_t tag,
                                                    std::span<std::byte> bytes) {
  std::vector<at::Tensor> tensors = {tensor_over(bytes)};
  return begin(mutex_, from, place_, [&] {
    return backend_->recv(tensors, static_cast<int>(from), static_cast<int>(tag));
  });
}

std::optional<std::size_t> GroupMessages::receive_any(std::uint32_t tag,
                                                      std::span<std::byte> bytes) {
  std::vector<at::Tensor> tensors = {tensor_over(bytes)};
  c10::intrusive_ptr<c10d::Work> work;
  try {
    {
      const MutexLock lock(mutex_);
      if (stopped_) {
        return std::nullopt;
      }
      any_ = backend_->recvAnysource(tensors, static_cast<int>(tag));
      work = any_;
    }
    if (!work->wait(kAsLongAsItTakes)) {
      return std::nullopt;
    }
  } catch (const std::exception& error) {
    throw Error(without_places(error));
  }
  return static_cast<std::size_t>(work->sourceRank());
}

void GroupMessages::stop() noexcept {
  const MutexLock lock(mutex_);
  stopped_ = true;
  if (any_) {
    any_->abort();
  }
}

}  // namespace castor
