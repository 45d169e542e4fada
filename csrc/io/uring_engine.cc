#include "io/uring_engine.h"

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/units.h"
#include "io/check_requests.h"
#include "io/locked_memory.h"
#include "io/unique_fd.h"

namespace castor {
namespace {

constexpr std::uint64_t kWakeTag = std::numeric_limits<std::uint64_t>::max();
// The kernel's limits: of one registered buffer, and a submission's 32-bit length.
constexpr std::size_t kMaxRegisteredBytes = kGiB;
constexpr std::size_t kMaxTransferBytes = kGiB;
constexpr std::size_t kMaxDepth = 4096;

const char* const kForbidden =
    "castor needs Linux 5.6 or later, and a container that allows the system calls io_uring_setup, "
    "io_uring_enter and io_uring_register; the thread engine needs none of them";

std::string no_memory_for_rings() {
  return "The kernel has no memory for its rings; " + locked_memory_remedy(locked_memory_limit()) +
         "; the thread engine locks none";
}

IoError uring_error(int result, const char* what_failed, const std::string& remedy = "") {
  return {-result, "io_uring", 0, what_failed, remedy};
}

}  // namespace

struct UringEngine::Ring {
  io_uring ring{};
  bool is_open = false;
  std::vector<IoFile> files;
  std::size_t depth = 0;
  std::size_t in_flight = 0;
  bool files_registered = false;
  std::vector<std::span<std::byte>> registered;  // what a buffer index of the kernel's means
  std::string buffers_note;
  UniqueFd wake_event;
  bool wake_armed = false;
  // Requests in flight; a completion names its place here.
  struct Slot {
    std::uint64_t tag = 0;
    std::size_t bytes = 0;
  };
  std::vector<Slot> slots;
  std::vector<std::uint32_t> free_slots;

  ~Ring() {
    if (is_open) {
      io_uring_queue_exit(&ring);
    }
  }

  void open(std::size_t queue_depth) {
    depth = queue_depth;
    // One more for the event that wake() signals.
    const auto entries = static_cast<unsigned>(depth + 1);
    io_uring_params params{};
    params.flags = IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN;
    int result = io_uring_queue_init_params(entries, &ring, &params);
    if (result == -EINVAL) {  // before Linux 5.19
      params = {};
      params.flags = IORING_SETUP_CLAMP;
      result = io_uring_queue_init_params(entries, &ring, &params);
    }
    if (result < 0) {
      throw result == -ENOMEM ? uring_error(result, "cannot set up", no_memory_for_rings())
                              : uring_error(result, "cannot set up", kForbidden);
    }
    is_open = true;
    // Best effort: on a failure a forked child shares the ring's pages, and does not touch them.
    (void)io_uring_ring_dontfork(&ring);

    const std::unique_ptr<io_uring_probe, decltype(&io_uring_free_probe)> probe(
        io_uring_get_probe_ring(&ring), &io_uring_free_probe);
    for (const int operation : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_POLL_ADD}) {
      if (!probe || io_uring_opcode_supported(probe.get(), operation) == 0) {
        throw uring_error(-ENOSYS, "this kernel lacks operations of", kForbidden);
      }
    }
    wake_event = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_event) {
      throw uring_error(-errno, "cannot make the wake event of");
    }
    slots.resize(depth);
    for (std::size_t i = depth; i-- > 0;) {
      free_slots.push_back(static_cast<std::uint32_t>(i));
    }
  }

  void register_files() {
    std::vector<int> descriptors;
    for (const IoFile& file : files) {
      descriptors.push_back(file.descriptor);
    }
    files_registered =
        !descriptors.empty() && io_uring_register_files(&ring, descriptors.data(),
                                                        static_cast<unsigned>(files.size())) == 0;
  }

  void register_buffers(std::span<const std::span<std::byte>> buffers) {
    std::vector<iovec> vectors;
    std::size_t bytes = 0;
    for (std::span<std::byte> rest : buffers) {
      bytes += rest.size();
      while (!rest.empty()) {
        const auto piece = rest.first(std::min(rest.size(), kMaxRegisteredBytes));
        registered.push_back(piece);
        vectors.push_back({piece.data(), piece.size()});
        rest = rest.subspan(piece.size());
      }
    }
    if (vectors.empty()) {
      return;
    }
    const int result =
        io_uring_register_buffers(&ring, vectors.data(), static_cast<unsigned>(vectors.size()));
    if (result < 0) {
      registered.clear();
      buffers_note = ", buffers of " + format_bytes(bytes) + " not registered (errno " +
                     std::to_string(-result) +
                     (result == -ENOMEM ? ": " + locked_memory_remedy(locked_memory_limit()) : "") +
                     ")";
    } else {
      buffers_note = ", " + format_bytes(bytes) + " of buffers registered";
    }
  }

  /// A free submission entry; makes room by submitting what is prepared.
  io_uring_sqe* next_entry() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring);
    if (entry == nullptr) {
      flush();
      entry = io_uring_get_sqe(&ring);
    }
    if (entry == nullptr) {
      throw uring_error(-EBUSY, "no submission entry left in");
    }
    return entry;
  }

  void flush() {
    while (io_uring_sq_ready(&ring) > 0) {
      const int result = io_uring_submit(&ring);
      if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
        throw uring_error(result, "cannot submit to");
      }
    }
  }

  /// Index of the registered buffer that holds all of `buffer`, or -1.
  [[nodiscard]] int registered_index(std::span<const std::byte> buffer) const {
    for (std::size_t i = 0; i < registered.size(); ++i) {
      const std::span<std::byte> held = registered[i];
      if (buffer.data() >= held.data() &&
          buffer.data() + buffer.size() <= held.data() + held.size()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  void prepare(const IoRequest& request) {
    io_uring_sqe* const entry = next_entry();
    const int file =
        files_registered ? static_cast<int>(request.file) : files[request.file].descriptor;
    // Beyond the limit the completion is a short one.
    const auto bytes = static_cast<unsigned>(std::min(request.buffer.size(), kMaxTransferBytes));
    const int buffer_index = registered_index(request.buffer);
    std::byte* const data = request.buffer.data();
    if (request.operation == IoOperation::kRead) {
      if (buffer_index >= 0) {
        io_uring_prep_read_fixed(entry, file, data, bytes, request.offset, buffer_index);
      } else {
        io_uring_prep_read(entry, file, data, bytes, request.offset);
      }
    } else if (buffer_index >= 0) {
      io_uring_prep_write_fixed(entry, file, data, bytes, request.offset, buffer_index);
    } else {
      io_uring_prep_write(entry, file, data, bytes, request.offset);
    }
    if (files_registered) {
      entry->flags |= IOSQE_FIXED_FILE;
    }
    const std::uint32_t slot = free_slots.back();
    free_slots.pop_back();
    slots[slot] = {request.tag, request.buffer.size()};
    io_uring_sqe_set_data64(entry, slot);
    ++in_flight;
  }

  void arm_wake() {
    if (!wake_armed) {
      io_uring_sqe* const entry = next_entry();
      io_uring_prep_poll_add(entry, wake_event.get(), POLLIN);
      io_uring_sqe_set_data64(entry, kWakeTag);
      wake_armed = true;
      flush();
    }
  }

  /// Takes what has finished; true when wake() was among it.
  bool reap(std::vector<IoCompletion>& completions) {
    bool woken = false;
    io_uring_cqe* entries[64];
    for (;;) {
      const unsigned count = io_uring_peek_batch_cqe(&ring, entries, std::size(entries));
      for (unsigned i = 0; i < count; ++i) {
        const std::uint64_t slot = io_uring_cqe_get_data64(entries[i]);
        const int result = entries[i]->res;
        if (slot == kWakeTag) {
          std::uint64_t signals = 0;
          // EAGAIN cannot be: it was readable, and nobody else reads it. Either way it is cleared.
          (void)!::read(wake_event.get(), &signals, sizeof(signals));
          wake_armed = false;
          woken = true;
          continue;
        }
        IoCompletion completion{.tag = slots[slot].tag, .expected_bytes = slots[slot].bytes};
        if (result < 0) {
          completion.error_number = -result;
        } else {
          completion.transferred_bytes = static_cast<std::size_t>(result);
        }
        completions.push_back(completion);
        free_slots.push_back(static_cast<std::uint32_t>(slot));
        --in_flight;
      }
      io_uring_cq_advance(&ring, count);
      if (count < std::size(entries)) {
        return woken;
      }
    }
  }
};

UringEngine::UringEngine(std::vector<IoFile> files, std::size_t queue_depth,
                         std::span<const std::span<std::byte>> buffers)
    : ring_(std::make_unique<Ring>()) {
  if (queue_depth == 0 || queue_depth > kMaxDepth) {
    throw InvalidArgument("an io_uring cannot have depth " + std::to_string(queue_depth) +
                          "; give 1 to " + std::to_string(kMaxDepth));
  }
  ring_->files = std::move(files);
  ring_->open(queue_depth);
  ring_->register_files();
  ring_->register_buffers(buffers);
}

UringEngine::~UringEngine() {
  std::vector<IoCompletion> ignored;
  while (ring_->in_flight > 0) {
    io_uring_cqe* entry = nullptr;
    const int result = io_uring_wait_cqe(&ring_->ring, &entry);
    if (result < 0 && result != -EINTR && result != -EAGAIN) {
      break;  // the ring is gone, and its transfers with it
    }
    (void)ring_->reap(ignored);
  }
}

void UringEngine::submit(std::span<const IoRequest> requests) {
  check_requests(requests, ring_->files.size(), ring_->in_flight, ring_->depth);
  for (const IoRequest& request : requests) {
    ring_->prepare(request);
  }
  ring_->flush();
}

void UringEngine::collect(std::size_t at_least, std::vector<IoCompletion>& completions) {
  const std::size_t before = completions.size();
  const std::size_t wanted = std::min(at_least, ring_->in_flight);
  for (;;) {
    const bool woken = ring_->reap(completions);
    const std::size_t taken = completions.size() - before;
    if (woken || taken >= wanted) {
      return;
    }
    ring_->arm_wake();
    // For one at a time, because a wake() must end the wait however many are wanted.
    io_uring_cqe* entry = nullptr;
    const int result = io_uring_wait_cqe(&ring_->ring, &entry);
    if (result < 0 && result != -EINTR && result != -EAGAIN) {
      throw uring_error(result, "cannot wait for");
    }
  }
}

void UringEngine::wake() noexcept {
  const std::uint64_t one = 1;
  // EAGAIN: the counter is full, so that the event is signalled already.
  (void)!::write(ring_->wake_event.get(), &one, sizeof(one));
}

std::size_t UringEngine::queue_depth() const noexcept { return ring_->depth; }

std::size_t UringEngine::in_flight() const noexcept { return ring_->in_flight; }

std::string UringEngine::description() const {
  return "io_uring of depth " + std::to_string(ring_->depth) +
         (ring_->files_registered ? ", files registered" : ", files not registered") +
         ring_->buffers_note;
}

}  // namespace castor
