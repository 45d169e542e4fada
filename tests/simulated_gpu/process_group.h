#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace castor::simulated {

class Communicator;
class Exchange;
class SimulatedWork;

/// Makes the group of the host that carries the bytes of a communicator. It may take `timeout` to
/// connect; its operations have no time limit that a test could meet.
using MakeHostGroup = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout)>;

/// The device memory that each communicator takes beside the caching allocator.
inline constexpr std::size_t kCommunicatorBytes = std::size_t{8} << 20;

/// torch's process group for ranks on simulated GPUs, with the semantics of NCCL's:
///
/// - Operations run in the order of a stream of the group's own. They begin when the caller's
///   stream has come so far; a Work's wait() makes the caller's stream wait, never the host. Only
///   the wait() of a barrier blocks the host as well.
/// - A Work keeps its tensors alive until wait(). The group keeps those of a Work that nobody waits
///   for until the operation is over.
/// - The first operation connects: the host waits there until all ranks have come, for `timeout`
///   at most. Two ranks on one device are refused. The device is named by CASTOR_SIMULATED_GPU_ID;
///   without it each process has its own.
/// - A send() or recv() that is not coalesced has a communicator, and a stream, of the two ranks
///   alone. Each communicator takes kCommunicatorBytes until abort() or shutdown().
/// - An operation whose peer has ended or never comes hangs its stream, without a time limit, until
///   abort(). The stream goes on then, and every later call throws.
///
/// Thread-safe, except that coalescing is of one thread at a time.
class SimulatedGroup final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  SimulatedGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                 std::chrono::milliseconds timeout, MakeHostGroup make_host_group);
  /// As shutdown().
  ~SimulatedGroup() override;

  // NOLINTNEXTLINE(readability-const-return-type): torch's
  const std::string getBackendName() const override { return "simnccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsCoalescing() const override { return true; }

  /// What is called until endCoalescing() becomes one task, in which all operations are begun
  /// before any is waited for.
  void startCoalescing() override;
  /// Returns an empty pointer if nothing was called.
  Work endCoalescing() override;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  /// SUM, AVG, PRODUCT, MIN and MAX, in the order of gloo.
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override;
  /// No sizes: the tensor is split evenly.
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                     std::vector<std::int64_t>& input_rows,
                     const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  /// As NCCL, which knows no tags: messages between two ranks are matched in order.
  Work send(Tensors& tensors, int rank, int tag) override;
  Work recv(Tensors& tensors, int rank, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;

  /// Ends what is under way, wherever it waits. Every later call throws DistBackendError.
  void abort() override;
  /// As abort(), after what is under way has had some seconds to end by itself.
  void shutdown() override;

 private:
  struct Batch;

  void check_usable() const;
  /// Lets go of the tensors of operations that are over.
  void collect();
  /// The one of this rank and `peer`, or of all ranks. The first call connects.
  [[nodiscard]] const std::shared_ptr<Communicator>& communicator_locked(int peer);
  /// An operation of all ranks, which hands over `bytes`.
  Work run(c10d::OpType type, Tensors tensors, std::size_t bytes,
           std::unique_ptr<Exchange> exchange);
  Work exchange_message(c10d::OpType type, Tensors& tensors, int peer);
  /// Enqueues one operation, or adds it to those that are coalesced.
  Work run_locked(c10d::OpType type, Tensors tensors, std::unique_ptr<Exchange> exchange, int peer);
  Work start_locked(std::unique_ptr<Batch> batch, int peer);
  /// Calls call(0) to call(count - 1), which run operations, as one task.
  template <typename Call>
  Work coalesced(std::size_t count, const Call& call);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds timeout_;
  const MakeHostGroup make_host_group_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // guards all below
  std::map<int, std::shared_ptr<Communicator>> communicators_;
  std::unique_ptr<Batch> batch_;  // between startCoalescing() and endCoalescing()
  std::deque<c10::intrusive_ptr<SimulatedWork>> under_way_;
};

}  // namespace castor::simulated
