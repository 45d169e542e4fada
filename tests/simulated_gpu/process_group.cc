#include "process_group.h"

#include <ATen/ATen.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "allocator.h"
#include "gpu.h"

namespace castor::simulated {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

constexpr int kAll = -1;
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24);  // NCCL has no time limit
constexpr std::chrono::milliseconds kPoll(1);
constexpr std::chrono::milliseconds kGrace = std::chrono::seconds(5);
constexpr const char* kAborted = "the communicator was aborted";

/// Names the device that the process computes on: CASTOR_SIMULATED_GPU_ID, or one of its own.
std::string device_id() {
  if (const char* const given = std::getenv("CASTOR_SIMULATED_GPU_ID"))
    return given;
  static const auto drawn =
      std::random_device()();  // processes of other namespaces have our number
  return "process " + std::to_string(::getpid()) + ", " + std::to_string(drawn);
}

/// Memory of the device, or a part of it. The Work keeps it alive.
struct Bytes {
  std::byte* data = nullptr;
  std::int64_t size = 0;
};

Bytes bytes_of(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == c10::DeviceType::PrivateUse1 && tensor.layout() == at::kStrided,
      "simnccl takes dense tensors of the simulated GPU, and was given one of ", tensor.device(),
      " with the layout ", tensor.layout());
  TORCH_CHECK(tensor.is_contiguous(), "simnccl takes contiguous tensors, and was given sizes ",
              tensor.sizes(), " with strides ", tensor.strides());
  if (tensor.numel() == 0)
    return {};
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()),
          static_cast<std::int64_t>(tensor.nbytes())};
}

std::vector<Bytes> bytes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Bytes> all;
  for (const at::Tensor& tensor : tensors)
    all.push_back(bytes_of(tensor));
  return all;
}

/// Parts of these sizes, one after the other.
std::vector<Bytes> parts_of(const Bytes& bytes, const std::vector<std::int64_t>& sizes) {
  std::vector<Bytes> parts;
  std::byte* data = bytes.data;
  for (const std::int64_t size : sizes) {
    parts.push_back({data, size});
    data += size;
  }
  return parts;
}

std::vector<std::int64_t> sizes_of(const std::vector<Bytes>& parts) {
  std::vector<std::int64_t> sizes;
  for (const Bytes& part : parts)
    sizes.push_back(part.size);
  return sizes;
}

std::int64_t total(const std::vector<std::int64_t>& sizes) {
  std::int64_t sum = 0;
  for (const std::int64_t size : sizes)
    sum += size;
  return sum;
}

/// The rows of a tensor that go to each rank, or come from it. `rows` empty: as many each.
std::vector<Bytes> split_rows(const at::Tensor& tensor, std::vector<std::int64_t> rows,
                              int num_ranks) {
  const Bytes bytes = bytes_of(tensor);
  TORCH_CHECK(tensor.dim() > 0, "all_to_all_single splits a tensor that has no dimension");
  if (rows.empty()) {
    TORCH_CHECK(tensor.size(0) % num_ranks == 0, "all_to_all_single cannot split ", tensor.size(0),
                " rows evenly between ", num_ranks, " ranks");
    rows.assign(static_cast<std::size_t>(num_ranks), tensor.size(0) / num_ranks);
  }
  TORCH_CHECK(rows.size() == static_cast<std::size_t>(num_ranks) && total(rows) == tensor.size(0),
              "all_to_all_single was given split sizes ", rows, " for ", tensor.size(0),
              " rows and ", num_ranks, " ranks");
  const std::int64_t row_bytes = tensor.size(0) == 0 ? 0 : bytes.size / tensor.size(0);
  for (std::int64_t& size : rows)
    size *= row_bytes;
  return parts_of(bytes, rows);
}

/// Host memory: a group of the host that is abandoned by abort() never touches the device's.
at::Tensor host_bytes(std::int64_t size) { return at::empty({size}, at::kByte); }

at::Tensor to_host(const std::vector<Bytes>& parts) {
  at::Tensor host = host_bytes(total(sizes_of(parts)));
  auto* data = static_cast<std::byte*>(host.mutable_data_ptr());
  for (const Bytes& part : parts) {
    if (part.size > 0)
      std::memcpy(data, part.data, static_cast<std::size_t>(part.size));
    data += part.size;
  }
  return host;
}

void to_device(const at::Tensor& host, const std::vector<Bytes>& parts) {
  const auto* data = static_cast<const std::byte*>(host.const_data_ptr());
  for (const Bytes& part : parts) {
    if (part.size > 0)
      std::memcpy(part.data, data, static_cast<std::size_t>(part.size));
    data += part.size;
  }
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "simnccl takes one tensor, and was given ", tensors.size());
  return tensors.front();
}

}  // namespace

/// One operation between ranks, on the thread of a stream.
class Exchange {
 public:
  Exchange() = default;
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Reads the device's memory and hands its bytes to the group of the host. Returns an empty
  /// pointer if there is nothing to exchange.
  [[nodiscard]] virtual Work begin(c10d::Backend& host) = 0;
  /// Writes the results into the device's memory.
  virtual void end() = 0;
  /// Whether the Work of begin() is a message's: its wait() is what tells of its end.
  [[nodiscard]] virtual bool is_message() const { return false; }
};

namespace {

class Broadcast final : public Exchange {
 public:
  Broadcast(Bytes bytes, std::int64_t root, bool is_root)
      : bytes_(bytes), root_(root), is_root_(is_root) {}

  Work begin(c10d::Backend& host) override {
    if (bytes_.size == 0)
      return {};
    std::vector<at::Tensor> staged{staged_ =
                                       is_root_ ? to_host({bytes_}) : host_bytes(bytes_.size)};
    c10d::BroadcastOptions options;
    options.rootRank = root_;
    return host.broadcast(staged, options);
  }
  void end() override {
    if (!is_root_ && bytes_.size > 0)
      to_device(staged_, {bytes_});
  }

 private:
  const Bytes bytes_;
  const std::int64_t root_;
  const bool is_root_;
  at::Tensor staged_;
};

/// The sum of all ranks, or this rank's shard of it.
class Reduce final : public Exchange {
 public:
  /// The result is what begins at `offset`, in bytes.
  Reduce(Bytes input, Bytes output, std::int64_t offset, at::ScalarType type,
         const c10d::ReduceOp& op, int num_ranks)
      : input_(input), output_(output), offset_(offset), type_(type), num_ranks_(num_ranks) {
    constexpr std::array kTypes{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                at::kInt,   at::kLong,   at::kChar, at::kByte};
    TORCH_CHECK(std::find(kTypes.begin(), kTypes.end(), type) != kTypes.end(),
                "simnccl does not reduce ", type);
    averages_ = op == c10d::ReduceOp::AVG;
    options_.reduceOp = averages_ ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    TORCH_CHECK(op == c10d::ReduceOp::SUM || averages_ || op == c10d::ReduceOp::PRODUCT ||
                    op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX,
                "simnccl, as NCCL, reduces with SUM, AVG, PRODUCT, MIN and MAX alone");
  }

  Work begin(c10d::Backend& host) override {
    if (input_.size == 0)
      return {};
    std::vector<at::Tensor> staged{staged_ = to_host({input_}).view(type_)};
    return host.allreduce(staged, options_);
  }
  void end() override {
    if (input_.size == 0)
      return;
    if (averages_ && at::isIntegralType(type_, false)) {
      staged_.div_(num_ranks_, "trunc");
    } else if (averages_) {
      staged_.div_(num_ranks_);
    }
    to_device(staged_.view(at::kByte).narrow(0, offset_, output_.size), {output_});
  }

 private:
  const Bytes input_;
  const Bytes output_;
  const std::int64_t offset_;
  const at::ScalarType type_;
  const int num_ranks_;
  bool averages_ = false;
  c10d::AllreduceOptions options_;
  at::Tensor staged_;
};

class AllGather final : public Exchange {
 public:
  AllGather(Bytes input, std::vector<Bytes> outputs) : input_(input), outputs_(std::move(outputs)) {
    for (const Bytes& output : outputs_)
      TORCH_CHECK(output.size == input.size, "all_gather was given ", input.size,
                  " bytes, and room for ", output.size);
  }

  Work begin(c10d::Backend& host) override {
    if (input_.size == 0)
      return {};
    std::vector<at::Tensor> inputs{to_host({input_})};
    staged_ = host_bytes(total(sizes_of(outputs_)));
    std::vector<std::vector<at::Tensor>> outputs{staged_.split(input_.size)};
    return host.allgather(outputs, inputs);
  }
  void end() override {
    if (input_.size > 0)
      to_device(staged_, outputs_);
  }

 private:
  const Bytes input_;
  const std::vector<Bytes> outputs_;
  at::Tensor staged_;
};

class AllToAll final : public Exchange {
 public:
  AllToAll(std::vector<Bytes> inputs, std::vector<Bytes> outputs)
      : inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  Work begin(c10d::Backend& host) override {
    std::vector<std::int64_t> sent = sizes_of(inputs_);
    std::vector<std::int64_t> received = sizes_of(outputs_);
    at::Tensor input = to_host(inputs_);
    staged_ = host_bytes(total(received));
    return host.alltoall_base(staged_, input, received, sent);
  }
  void end() override { to_device(staged_, outputs_); }

 private:
  const std::vector<Bytes> inputs_;
  const std::vector<Bytes> outputs_;
  at::Tensor staged_;
};

/// A send or a receive.
class Message final : public Exchange {
 public:
  enum class Kind { kSend, kReceive };
  Message(Kind kind, Bytes bytes, int peer) : kind_(kind), bytes_(bytes), peer_(peer) {}

  Work begin(c10d::Backend& host) override {
    if (bytes_.size == 0)
      return {};
    const bool sends = kind_ == Kind::kSend;
    std::vector<at::Tensor> staged{staged_ = sends ? to_host({bytes_}) : host_bytes(bytes_.size)};
    return sends ? host.send(staged, peer_, 0) : host.recv(staged, peer_, 0);
  }
  void end() override {
    if (kind_ == Kind::kReceive && bytes_.size > 0)
      to_device(staged_, {bytes_});
  }
  bool is_message() const override { return true; }

 private:
  const Kind kind_;
  const Bytes bytes_;
  const int peer_;
  at::Tensor staged_;
};

class Barrier final : public Exchange {
 public:
  Work begin(c10d::Backend& host) override { return host.barrier(); }
  void end() override {}
};

/// What the tasks of a communicator wait for, and what ends their waiting. Thread-safe; callbacks
/// of the group of the host may outlive the communicator.
class Progress {
 public:
  /// Returns false if it was aborted before.
  bool abort() {
    const std::lock_guard lock(mutex_);
    for (const Work& message : messages_)
      message->abort();
    changed_.notify_all();
    return !std::exchange(aborted_, true);
  }
  [[nodiscard]] bool aborted() const {
    const std::lock_guard lock(mutex_);
    return aborted_;
  }
  /// Whether a task can only end by abort().
  [[nodiscard]] bool lost() const {
    const std::lock_guard lock(mutex_);
    return lost_ && !aborted_;
  }
  [[nodiscard]] bool idle() const {
    const std::lock_guard lock(mutex_);
    return num_collectives_ == 0;
  }

  /// Before the collective is waited for.
  static void watch(const std::shared_ptr<Progress>& progress, c10d::Work& collective) {
    {
      const std::lock_guard lock(progress->mutex_);
      ++progress->num_collectives_;
    }
    collective.getFuture()->addCallback([progress](c10::ivalue::Future& future) {
      const std::lock_guard lock(progress->mutex_);
      --progress->num_collectives_;
      progress->lost_ = progress->lost_ || future.hasError();
      progress->changed_.notify_all();
    });
  }
  void watch(const Work& message) {
    const std::lock_guard lock(mutex_);
    messages_.push_back(message);
    if (aborted_)
      message->abort();
  }

  /// Waits for all that is watched. Returns false if abort() came before its end.
  [[nodiscard]] bool wait() {
    for (const Work& message : watched_messages()) {
      if (!message->wait(kForever))
        return false;
    }
    std::unique_lock lock(mutex_);
    messages_.clear();
    changed_.wait(lock, [this] { return aborted_ || (num_collectives_ == 0 && !lost_); });
    return !aborted_;
  }
  void wait_for_abort() {
    std::unique_lock lock(mutex_);
    lost_ = true;
    messages_.clear();
    changed_.wait(lock, [this] { return aborted_; });
  }

 private:
  [[nodiscard]] std::vector<Work> watched_messages() const {
    const std::lock_guard lock(mutex_);
    return messages_;
  }

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<Work> messages_;
  std::size_t num_collectives_ = 0;
  bool lost_ = false;
  bool aborted_ = false;
};

/// The group of the host that carries a communicator's bytes, and how far it is.
class Link {
 public:
  explicit Link(c10::intrusive_ptr<c10d::Backend> host) : host_(std::move(host)) {}
  /// A thread that waits for a peer cannot be stopped: then the group stays, with its threads.
  ~Link() {
    if (!progress_->idle())
      static_cast<void>(host_.release());
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  [[nodiscard]] Progress& progress() noexcept { return *progress_; }

  /// One task. Returns false if abort() ended it.
  [[nodiscard]] bool run(const std::vector<std::unique_ptr<Exchange>>& exchanges) {
    if (progress_->aborted())
      return false;
    try {
      for (const auto& exchange : exchanges) {
        const Work work = exchange->begin(*host_);
        if (!work)
          continue;
        if (exchange->is_message()) {
          progress_->watch(work);
        } else {
          Progress::watch(progress_, *work);
        }
      }
      if (!progress_->wait())
        return false;
    } catch (const std::exception&) {
      // A peer has gone. NCCL's kernels do not learn that either: they wait on.
      progress_->wait_for_abort();
      return false;
    }
    for (const auto& exchange : exchanges)
      exchange->end();
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::Backend> host_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
};

/// Throws DistBackendError where two ranks are on one device, or a rank does not come.
void check_devices(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
                   const std::atomic<bool>& aborted) {
  const auto key = [](int of) { return "device " + std::to_string(of); };
  const std::string own = device_id();
  store.set(key(rank), std::vector<std::uint8_t>(own.begin(), own.end()));
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::map<std::string, int> ranks;
  for (int other = 0; other < size; ++other) {
    while (!store.check({key(other)})) {
      TORCH_CHECK_WITH(DistBackendError, !aborted, kAborted);
      TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < end, "rank ", other,
                       " has not begun to communicate after ", timeout.count(), " ms");
      std::this_thread::sleep_for(kPoll);
    }
    const std::vector<std::uint8_t> id = store.get(key(other));
    const auto [found, is_first] = ranks.emplace(std::string(id.begin(), id.end()), other);
    TORCH_CHECK_WITH(DistBackendError, is_first, "ranks ", found->second, " and ", other,
                     " are on one GPU (", found->first, "): a communicator takes a device once");
  }
}

}  // namespace

/// Some ranks that are connected, and the stream of what they exchange.
class Communicator {
 public:
  /// Waits until all ranks have come. Throws DistBackendError if they do not.
  Communicator(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               std::chrono::milliseconds timeout, const MakeHostGroup& make_host_group,
               const std::atomic<bool>& aborted) {
    check_devices(*store, rank, size, timeout, aborted);
    link_ = std::make_shared<Link>(make_host_group(
        c10::make_intrusive<c10d::PrefixStore>("host", store), rank, size, timeout));
    stream_ = Gpu::instance().new_stream();
    device_memory().take_beside(kCommunicatorBytes);
  }
  /// Never waits for a peer. A stream that does not come to rest stays with the device.
  ~Communicator() {
    settle();
    abort();
    const auto end = std::chrono::steady_clock::now() + kGrace;
    while (!Moment(stream_).past() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(kPoll);
    if (Moment(stream_).past())
      Gpu::instance().remove_stream(stream_->id());
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Enqueues a task that begins after all that the caller's stream has been given. Returns its
  /// end.
  [[nodiscard]] Moment enqueue(std::shared_ptr<std::vector<std::unique_ptr<Exchange>>> exchanges,
                               std::shared_ptr<std::atomic<bool>> cut_short) {
    Moment(current_queue()).block(*stream_);
    stream_->enqueue([link = link_, exchanges = std::move(exchanges),
                      cut_short = std::move(cut_short)] { *cut_short = !link->run(*exchanges); });
    return Moment(stream_);
  }
  [[nodiscard]] const std::shared_ptr<Stream>& stream() const noexcept { return stream_; }
  void abort() {
    if (link_->progress().abort())
      device_memory().give_beside(kCommunicatorBytes);
  }
  /// Waits some seconds for what is under way, unless only abort() can end it.
  void settle() const {
    const auto end = std::chrono::steady_clock::now() + kGrace;
    const Moment all(stream_);
    while (!all.past() && !link_->progress().aborted() && !link_->progress().lost() &&
           std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(kPoll);
  }

 private:
  std::shared_ptr<Link> link_;
  std::shared_ptr<Stream> stream_;
};

/// What torch gives the caller of an operation. Thread-safe.
class SimulatedWork final : public c10d::Work {
 public:
  SimulatedWork(int rank, c10d::OpType type) : c10d::Work(rank, type) {}

  /// Until wait(), or until the group finds that the operation is over.
  void keep(std::vector<at::Tensor> tensors) {
    const std::lock_guard lock(mutex_);
    for (at::Tensor& tensor : tensors)
      tensors_.push_back(std::move(tensor));
  }
  void let_go() {
    std::vector<at::Tensor> tensors;  // go without the lock
    const std::lock_guard lock(mutex_);
    tensors.swap(tensors_);
  }
  void set_end(Moment end, std::shared_ptr<Communicator> communicator) {
    const std::lock_guard lock(mutex_);
    end_ = std::move(end);
    stream_ = communicator->stream()->id();
    communicator_ = std::move(communicator);
  }
  /// True where the stream's task was ended by abort().
  [[nodiscard]] const std::shared_ptr<std::atomic<bool>>& cut_short() const { return cut_short_; }

  bool isCompleted() override {
    const std::optional<Moment> end = this->end();
    return end && end->past();
  }
  bool isSuccess() const override { return !*cut_short_; }
  std::exception_ptr exception() const override {
    return *cut_short_ ? std::make_exception_ptr(std::runtime_error(kAborted)) : nullptr;
  }
  /// The caller's stream waits. Without effect while operations are being coalesced.
  void synchronize() override {
    if (const std::optional<Moment> end = this->end()) {
      end->block(*current_queue());
      let_go();
    }
  }
  /// As synchronize(), whatever the timeout. As with NCCL a barrier's blocks the host too.
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    if (opType_ == c10d::OpType::BARRIER)
      current_queue()->synchronize();
    return true;
  }
  void abort() override {
    if (const std::shared_ptr<Communicator> communicator = this->communicator())
      communicator->abort();
  }
  /// As NCCL's it is complete at once: to wait for it makes the caller's stream wait. Its value is
  /// the list of the operation's tensors, outputs first, which it keeps alive.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(end_, "there is no future before the operation has begun");
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()),
          std::vector<c10::Device>{c10::Device(c10::DeviceType::PrivateUse1, 0)});
      const c10::Stream before = exchange_stream(torch_stream(stream_));
      future_->markCompleted(at::IValue(tensors_));
      exchange_stream(before);
    }
    return future_;
  }

 private:
  [[nodiscard]] std::optional<Moment> end() const {
    const std::lock_guard lock(mutex_);
    return end_;
  }
  [[nodiscard]] std::shared_ptr<Communicator> communicator() const {
    const std::lock_guard lock(mutex_);
    return communicator_.lock();
  }

  const std::shared_ptr<std::atomic<bool>> cut_short_ = std::make_shared<std::atomic<bool>>(false);
  std::vector<at::Tensor> tensors_;                 // guarded by mutex_
  std::optional<Moment> end_;                       // guarded by mutex_
  std::weak_ptr<Communicator> communicator_;        // guarded by mutex_
  std::uint64_t stream_ = 0;                        // the communicator's; guarded by mutex_
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
};

struct SimulatedGroup::Batch {
  c10::intrusive_ptr<SimulatedWork> work;
  std::vector<std::unique_ptr<Exchange>> exchanges;
};

SimulatedGroup::SimulatedGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               std::chrono::milliseconds timeout, MakeHostGroup make_host_group)
    : Backend(rank, size),
      store_(std::move(store)),
      timeout_(timeout),
      make_host_group_(std::move(make_host_group)) {}

SimulatedGroup::~SimulatedGroup() { SimulatedGroup::shutdown(); }

c10::intrusive_ptr<c10d::Backend::Options> SimulatedGroup::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void SimulatedGroup::check_usable() const {
  TORCH_CHECK_WITH(DistBackendError, !aborted_, kAborted);
}

void SimulatedGroup::collect() {
  std::vector<c10::intrusive_ptr<SimulatedWork>> over;  // whose tensors go without the lock
  {
    const std::lock_guard lock(mutex_);
    for (auto work = under_way_.begin(); work != under_way_.end();) {
      if ((*work)->isCompleted()) {
        over.push_back(std::move(*work));
        work = under_way_.erase(work);
      } else {
        ++work;
      }
    }
  }
  for (const auto& work : over)
    work->let_go();
}

const std::shared_ptr<Communicator>& SimulatedGroup::communicator_locked(int peer) {
  std::shared_ptr<Communicator>& communicator = communicators_[peer];
  if (communicator)
    return communicator;
  if (peer == kAll) {
    communicator =
        std::make_shared<Communicator>(c10::make_intrusive<c10d::PrefixStore>("all", store_), rank_,
                                       size_, timeout_, make_host_group_, aborted_);
  } else {
    const auto [first, second] = std::minmax(peer, rank_);
    communicator = std::make_shared<Communicator>(
        c10::make_intrusive<c10d::PrefixStore>(
            std::to_string(first) + " and " + std::to_string(second), store_),
        rank_ == first ? 0 : 1, 2, timeout_, make_host_group_, aborted_);
  }
  return communicator;
}

SimulatedGroup::Work SimulatedGroup::run(c10d::OpType type, Tensors tensors, std::size_t bytes,
                                         std::unique_ptr<Exchange> exchange) {
  check_usable();
  collect();
  const std::lock_guard lock(mutex_);
  const Work work = run_locked(type, std::move(tensors), std::move(exchange), kAll);
  ++counts().collectives;
  counts().collective_bytes += bytes;
  return work;
}

SimulatedGroup::Work SimulatedGroup::run_locked(c10d::OpType type, Tensors tensors,
                                                std::unique_ptr<Exchange> exchange, int peer) {
  if (batch_) {
    batch_->work->keep(std::move(tensors));
    batch_->exchanges.push_back(std::move(exchange));
    return batch_->work;
  }
  auto batch = std::make_unique<Batch>();
  batch->work = c10::make_intrusive<SimulatedWork>(rank_, type);
  batch->work->keep(std::move(tensors));
  batch->exchanges.push_back(std::move(exchange));
  return start_locked(std::move(batch), peer);
}

SimulatedGroup::Work SimulatedGroup::start_locked(std::unique_ptr<Batch> batch, int peer) {
  const std::shared_ptr<Communicator>& communicator = communicator_locked(peer);
  const c10::intrusive_ptr<SimulatedWork> work = batch->work;
  auto exchanges =
      std::make_shared<std::vector<std::unique_ptr<Exchange>>>(std::move(batch->exchanges));
  work->set_end(communicator->enqueue(std::move(exchanges), work->cut_short()), communicator);
  under_way_.push_back(work);
  return work;
}

void SimulatedGroup::startCoalescing() {
  check_usable();
  const std::lock_guard lock(mutex_);
  batch_ = std::make_unique<Batch>();  // one that an error has left behind goes
  batch_->work = c10::make_intrusive<SimulatedWork>(rank_, c10d::OpType::COALESCED);
}

SimulatedGroup::Work SimulatedGroup::endCoalescing() {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Batch> batch = std::move(batch_);
  check_usable();
  TORCH_CHECK(batch, "endCoalescing() was called without startCoalescing()");
  if (batch->exchanges.empty())
    return {};
  return start_locked(std::move(batch), kAll);
}

template <typename Call>
SimulatedGroup::Work SimulatedGroup::coalesced(std::size_t count, const Call& call) {
  const bool nested = [this] {
    const std::lock_guard lock(mutex_);
    return batch_ != nullptr;
  }();
  if (!nested)
    startCoalescing();
  Work last;
  for (std::size_t i = 0; i < count; ++i)
    last = call(i);
  return nested ? last : endCoalescing();
}

SimulatedGroup::Work SimulatedGroup::broadcast(Tensors& tensors,
                                               const c10d::BroadcastOptions& options) {
  const Bytes bytes = bytes_of(only(tensors));
  const bool is_root = options.rootRank == rank_;
  return run(c10d::OpType::BROADCAST, tensors, is_root ? tensors[0].nbytes() : 0,
             std::make_unique<Broadcast>(bytes, options.rootRank, is_root));
}

SimulatedGroup::Work SimulatedGroup::allreduce(Tensors& tensors,
                                               const c10d::AllreduceOptions& options) {
  const Bytes bytes = bytes_of(only(tensors));
  return run(
      c10d::OpType::ALLREDUCE, tensors, tensors[0].nbytes(),
      std::make_unique<Reduce>(bytes, bytes, 0, tensors[0].scalar_type(), options.reduceOp, size_));
}

SimulatedGroup::Work SimulatedGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return coalesced(tensors.size(), [&](std::size_t i) {
    Tensors one{tensors[i]};
    return allreduce(one, options);
  });
}

SimulatedGroup::Work SimulatedGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& /*options*/) {
  const Bytes input = bytes_of(only(inputs));
  TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == static_cast<std::size_t>(size_),
              "all_gather takes as many outputs as there are ranks");
  Tensors tensors = outputs[0];
  tensors.push_back(inputs[0]);
  return run(c10d::OpType::ALLGATHER, std::move(tensors), inputs[0].nbytes(),
             std::make_unique<AllGather>(input, bytes_of(outputs[0])));
}

SimulatedGroup::Work SimulatedGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::AllgatherOptions& /*options*/) {
  const Bytes from = bytes_of(input);
  const Bytes to = bytes_of(output);
  TORCH_CHECK(to.size == size_ * from.size && output.dtype() == input.dtype(),
              "all_gather_into_tensor gathers ", input.sizes(), " of ", input.dtype(), " from ",
              size_, " ranks, and was given room for ", output.sizes(), " of ", output.dtype());
  const std::vector<std::int64_t> sizes(static_cast<std::size_t>(size_), from.size);
  return run(c10d::OpType::_ALLGATHER_BASE, {output, input}, input.nbytes(),
             std::make_unique<AllGather>(from, parts_of(to, sizes)));
}

SimulatedGroup::Work SimulatedGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return coalesced(inputs.size(), [&](std::size_t i) {
    return _allgather_base(outputs.at(i), inputs[i], options);
  });
}

SimulatedGroup::Work SimulatedGroup::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const Bytes from = bytes_of(input);
  const Bytes to = bytes_of(output);
  TORCH_CHECK(from.size == size_ * to.size && output.dtype() == input.dtype(),
              "reduce_scatter_tensor scatters ", input.sizes(), " of ", input.dtype(), " to ",
              size_, " ranks, and was given room for ", output.sizes(), " of ", output.dtype());
  return run(c10d::OpType::_REDUCE_SCATTER_BASE, {output, input}, input.nbytes(),
             std::make_unique<Reduce>(from, to, rank_ * to.size, input.scalar_type(),
                                      options.reduceOp, size_));
}

SimulatedGroup::Work SimulatedGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return coalesced(inputs.size(), [&](std::size_t i) {
    return _reduce_scatter_base(outputs.at(i), inputs[i], options);
  });
}

SimulatedGroup::Work SimulatedGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                   std::vector<std::int64_t>& output_rows,
                                                   std::vector<std::int64_t>& input_rows,
                                                   const c10d::AllToAllOptions& /*options*/) {
  return run(c10d::OpType::ALLTOALL_BASE, {output, input}, input.nbytes(),
             std::make_unique<AllToAll>(split_rows(input, input_rows, size_),
                                        split_rows(output, output_rows, size_)));
}

SimulatedGroup::Work SimulatedGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllToAllOptions& /*options*/) {
  const auto num_ranks = static_cast<std::size_t>(size_);
  TORCH_CHECK(inputs.size() == num_ranks && outputs.size() == num_ranks,
              "all_to_all takes a tensor for each rank");
  std::vector<Bytes> from = bytes_of(inputs);
  const std::int64_t sent = total(sizes_of(from));
  Tensors tensors = outputs;
  tensors.insert(tensors.end(), inputs.begin(), inputs.end());
  return run(c10d::OpType::ALLTOALL, std::move(tensors), static_cast<std::size_t>(sent),
             std::make_unique<AllToAll>(std::move(from), bytes_of(outputs)));
}

SimulatedGroup::Work SimulatedGroup::exchange_message(c10d::OpType type, Tensors& tensors,
                                                      int peer) {
  const Bytes bytes = bytes_of(only(tensors));
  TORCH_CHECK(0 <= peer && peer < size_ && peer != rank_, "rank ", rank_, " of ", size_,
              " cannot exchange a message with rank ", peer);
  check_usable();
  collect();
  const bool sends = type == c10d::OpType::SEND;
  const auto kind = sends ? Message::Kind::kSend : Message::Kind::kReceive;
  const std::lock_guard lock(mutex_);
  const int in_communicator = batch_ ? peer : static_cast<int>(rank_ < peer);
  const Work work =
      run_locked(type, tensors, std::make_unique<Message>(kind, bytes, in_communicator), peer);
  ++counts().collectives;
  counts().collective_bytes += sends ? tensors[0].nbytes() : 0;
  return work;
}

SimulatedGroup::Work SimulatedGroup::send(Tensors& tensors, int rank, int /*tag*/) {
  return exchange_message(c10d::OpType::SEND, tensors, rank);
}

SimulatedGroup::Work SimulatedGroup::recv(Tensors& tensors, int rank, int /*tag*/) {
  return exchange_message(c10d::OpType::RECV, tensors, rank);
}

SimulatedGroup::Work SimulatedGroup::barrier(const c10d::BarrierOptions& /*options*/) {
  return run(c10d::OpType::BARRIER, {}, 0, std::make_unique<Barrier>());
}

void SimulatedGroup::abort() {
  aborted_ = true;  // a thread that connects holds the lock until it sees this
  const std::lock_guard lock(mutex_);
  for (const auto& [peer, communicator] : communicators_) {
    if (communicator)
      communicator->abort();
  }
}

void SimulatedGroup::shutdown() {
  if (!aborted_) {
    std::vector<std::shared_ptr<Communicator>> communicators;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [peer, communicator] : communicators_) {
        if (communicator)
          communicators.push_back(communicator);
      }
    }
    for (const auto& communicator : communicators)
      communicator->settle();
  }
  abort();
}

}  // namespace castor::simulated
