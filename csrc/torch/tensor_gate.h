#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/mutex.h"
#include "store/operator_gate.h"

namespace castor {

/// Gate that holds torch's operators back from tensors whose memory something else still uses: an
/// update that has yet to run, or a copy that is under way.
///
/// Tensors are watched in groups, each of which opens and closes as one. While a group is closed,
/// the first operator that takes one of its tensors, or an alias made meanwhile by `.data`, calls
/// `settle` for the group. `settle` returns when the memory may be used; the group is open from
/// then on. Such operators read weights, gradients or moments between two steps: an exponential
/// average, a norm, a state_dict, zero_grad, another module. The gate costs nothing while no group
/// is closed.
///
/// The gate uses a dispatch key that torch keeps for out-of-tree use (DeferredInit): a closed
/// tensor carries the key, whose kernel for every operator is the wait. `.data` waits too; torch
/// begins to pickle a parameter with it. Other reads without an operator (data_ptr(), a storage)
/// cannot be held back: meanwhile torch throws where it is asked for the address.
///
/// While a save still reads a group's memory, on a thread of its own, only the operators that write
/// it are held back. Reader::await returns when the memory has been read.
///
/// Guarded tensors are those whose memory is not there all the time, or may become another's while
/// an operator runs. Every operator on one, or on any tensor that shares its memory, runs within a
/// visit, which has the memory there and keeps it.
///
/// Owned by the session. Thread-safe. `settle` and `visit` must not come back to the gate, and a
/// reader never does.
class TensorGate final : public OperatorGate, public std::enable_shared_from_this<TensorGate> {
 public:
  enum class Guard : std::uint8_t {
    kNone,
    kHeld,     ///< a visit costs no memory
    kBrought,  ///< a visit may have to bring it in; nothing may use it after that visit
  };
  using Settle = std::function<void(std::size_t group)>;
  /// Reader of groups beside the operators.
  struct Reader {
    std::function<bool(std::size_t group)> reads;  ///< whether it still reads it; never waits
    Settle await;                                  ///< waits until it does not any more
  };
  using Use = OperatorUse;
  /// Begins the visit of different groups, which ends with the returned object.
  using Visit = std::function<std::shared_ptr<void>(std::span<const Use> uses)>;

  /// Makes a gate with open groups. `visit` may be empty where no group is guarded.
  static std::shared_ptr<TensorGate> create(std::size_t num_groups, Settle settle, Reader reader,
                                            Visit visit = {});
  ~TensorGate() override;
  TensorGate(const TensorGate&) = delete;
  TensorGate& operator=(const TensorGate&) = delete;

  /// Guards the group so from now on and for good. To be called before tensors are watched.
  void guard(std::size_t group, Guard guard);
  /// Adds `tensor` to the group. Its storage belongs to no other group. Returns its position there.
  std::size_t watch(std::size_t group, at::Tensor tensor);
  /// Puts `tensor` in place of the one at that position, which may lie over other memory by now.
  void replace(std::size_t group, std::size_t position, at::Tensor tensor);
  /// Holds back, as those that are watched, a tensor that was made over the group's memory by other
  /// means than torch's.
  void follow(std::size_t group, const at::Tensor& tensor);
  /// Ends what watch() began. Opens the group as pass() does. Positions of tensors that were
  /// watched later shift.
  void unwatch(std::size_t group, const at::Tensor& tensor);
  void close(std::size_t group) override;
  void open(std::size_t group) override;
  /// Notes that a reader has begun with the group. No call notes its end, since the reader waits
  /// for nobody.
  void share(std::size_t group);
  void pass(std::size_t group) override;
  /// Same as pass(group), for an operator on `tensor`, which is the group's or an alias. Waits for
  /// the reader too if the operator `writes`. Returns how the group is guarded.
  Guard pass(std::size_t group, const at::Tensor& tensor, bool writes);
  void pass_all() override;
  [[nodiscard]] std::shared_ptr<void> visit(std::span<const Use> uses) { return visit_(uses); }

 private:
  TensorGate(std::size_t num_groups, Settle settle, Reader reader, Visit visit);

  /// Watched tensor with its storage. A user may give `tensor` other memory at any time: the gate
  /// holds back `storage`.
  struct Watched {
    at::Tensor tensor;
    c10::Storage storage;
  };
  struct Group {
    std::vector<Watched> watched;
    bool closed = false;
    bool shared = false;  // a reader has begun; it may have ended
    Guard guard = Guard::kNone;
  };
  void hold_back(std::size_t group, const Watched& watched);
  void begin_watch(std::size_t group, const Watched& watched) CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool held_back(std::size_t group) const CASTOR_REQUIRES(mutex_);
  void let_go(std::size_t group) CASTOR_REQUIRES(mutex_);
  void open_locked(std::size_t group) CASTOR_REQUIRES(mutex_);
  void pass_locked(std::size_t group) CASTOR_REQUIRES(mutex_);

  Mutex mutex_;  // held while settle runs, so that nobody closes meanwhile
  std::vector<Group> groups_ CASTOR_GUARDED_BY(mutex_);
  // Groups that are closed, or being opened; written under the mutex. Release and acquire: who sees
  // none sees all of them open.
  std::atomic<std::size_t> num_closed_{0};
  const Settle settle_;
  const Reader reader_;
  const Visit visit_;
};

/// Returns whether operators on the tensor pass a gate: its memory is held back, or guarded.
[[nodiscard]] bool is_gated(const at::Tensor& tensor) noexcept;
/// Returns the tensor, for a caller that reads its memory without an operator; a copy where
/// is_gated().
[[nodiscard]] at::Tensor readable(const at::Tensor& tensor);

}  // namespace castor
