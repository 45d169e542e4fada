#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/mutex.h"
#include "core/rank_messages.h"
#include "ranks/rank_waits.h"

namespace castor {

/// Messages over a process group that torch.distributed has made, through the group's backend for
/// the CPU, gloo. May be used with or without Python's lock, which must not be held where it waits.
class GroupMessages final : public RankMessages {
 public:
  /// Takes the group by its name, like GroupCollectives, and throws the same. Nothing else sends
  /// over the group meanwhile. `place` is that of the threads that wait for a message.
  GroupMessages(const std::string& group, std::shared_ptr<RankPlace> place);

  [[nodiscard]] std::size_t rank() const noexcept override;
  [[nodiscard]] std::size_t size() const noexcept override;
  [[nodiscard]] std::unique_ptr<RankMessage> send(std::size_t to, std::uint32_t tag,
                                                  std::span<const std::byte> bytes) override;
  [[nodiscard]] std::unique_ptr<RankMessage> receive(std::size_t from, std::uint32_t tag,
                                                     std::span<std::byte> bytes) override;
  [[nodiscard]] std::optional<std::size_t> receive_any(std::uint32_t tag,
                                                       std::span<std::byte> bytes) override;
  void stop() noexcept override;

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<RankPlace> place_;
  Mutex mutex_;  // gloo counts begun operations without a lock of its own
  c10::intrusive_ptr<c10d::Work> any_ CASTOR_GUARDED_BY(mutex_);
  bool stopped_ CASTOR_GUARDED_BY(mutex_) = false;
};

}  // namespace castor
