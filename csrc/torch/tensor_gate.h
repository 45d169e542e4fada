#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/mutex.h"

namespace castor {

/// Holds torch's operators back from tensors whose memory something else is still using: an update
/// that has yet to run, a copy that is under way.
///
/// Tensors are watched in groups that open and close together. While a group is closed, the first
/// operator that takes one of its tensors, or an alias made meanwhile by `.data`, calls `settle`
/// for the group, which returns when the memory may be used; the group is open from then on. That
/// is whoever reads weights, gradients or moments between two steps: an exponential average, a
/// norm, a state_dict, zero_grad, another module. While nothing is closed it costs nothing.
///
/// The means is a dispatch key that torch keeps for out-of-tree use (DeferredInit): a closed tensor
/// carries it, and its kernel for every operator is the wait. So does `.data`, with which torch
/// begins to pickle a parameter. What else reads memory without an operator (data_ptr(), a storage)
/// cannot be held back: meanwhile torch throws where it asks for the address.
///
/// While a save still reads a group's memory, on a thread of its own, only the operators that write
/// it are held back: `await_reader` returns when it has been read.
///
/// Tensors whose memory is not there all the time, or may become another's while an operator runs,
/// are guarded: every operator on one, or on any tensor that shares its memory, is run within a
/// visit, which has the memory there and keeps it.
///
/// Owned by the session. Thread-safe; settle and visit must not come back to the gate, and a reader
/// never does.
class TensorGate : public std::enable_shared_from_this<TensorGate> {
 public:
  enum class Guard : std::uint8_t {
    kNone,
    kHeld,     ///< a visit costs no memory
    kBrought,  ///< a visit may have to bring it in, and then nothing may use it afterwards
  };
  using Settle = std::function<void(std::size_t group)>;
  /// Who reads groups beside the operators.
  struct Reader {
    std::function<bool(std::size_t group)> reads;  ///< still; never waits
    Settle await;                                  ///< returns when it does not
  };
  /// What an operator does with a guarded group.
  struct Use {
    std::size_t group = 0;
    bool writes = false;
  };
  /// Begins the visit of different groups; it ends with what is returned.
  using Visit = std::function<std::shared_ptr<void>(std::span<const Use> uses)>;

  /// `visit` may be empty where no group is guarded.
  static std::shared_ptr<TensorGate> create(std::size_t num_groups, Settle settle, Reader reader,
                                            Visit visit = {});
  ~TensorGate();
  TensorGate(const TensorGate&) = delete;
  TensorGate& operator=(const TensorGate&) = delete;

  /// The group is guarded so, now and for good. Before tensors are watched.
  void guard(std::size_t group, Guard guard);
  /// `tensor` belongs to the group from now on. Its storage belongs to no other group. Returns its
  /// position there.
  std::size_t watch(std::size_t group, at::Tensor tensor);
  /// `tensor` takes the place of the one at that position, which may lie over other memory by now.
  void replace(std::size_t group, std::size_t position, at::Tensor tensor);
  /// A tensor that was made over the group's memory by other means than torch's is held back as
  /// those that are watched.
  void follow(std::size_t group, const at::Tensor& tensor);
  /// Ends what watch() began. The group is open. Positions of those that were watched later shift.
  void unwatch(std::size_t group, const at::Tensor& tensor);
  void close(std::size_t group);
  /// No effect on an open group.
  void open(std::size_t group);
  /// A reader has begun with the group; it ends without a call, since it waits for nobody.
  void share(std::size_t group);
  /// Waits for a closed group and opens it; rethrows what settle throws, the group closed as it
  /// was.
  void pass(std::size_t group);
  /// As pass, for an operator on `tensor`, which is the group's or an alias, and which waits for
  /// the reader if it `writes`. Returns how the group is guarded.
  Guard pass(std::size_t group, const at::Tensor& tensor, bool writes);
  /// As pass, for every group. Costs next to nothing while all are open.
  void pass_all();
  [[nodiscard]] std::shared_ptr<void> visit(std::span<const Use> uses) { return visit_(uses); }

 private:
  TensorGate(std::size_t num_groups, Settle settle, Reader reader, Visit visit);

  /// `tensor` may be given other memory by its user, at any time: what is held back is `storage`.
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
  std::size_t num_closed_ CASTOR_GUARDED_BY(mutex_) = 0;
  const Settle settle_;
  const Reader reader_;
  const Visit visit_;
};

/// Whether operators on the tensor pass a gate: its memory is held back, or guarded.
[[nodiscard]] bool is_gated(const at::Tensor& tensor) noexcept;
/// The tensor, for who reads its memory without an operator; a copy, where the tensor is guarded.
[[nodiscard]] at::Tensor readable(const at::Tensor& tensor);

}  // namespace castor
