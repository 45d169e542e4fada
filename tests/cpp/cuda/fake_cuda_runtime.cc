#include "cuda/fake_cuda_runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

// The opaque types of CUDA's interface.
struct CUevent_st {
  bool timed = false;
  std::uint64_t recorded = 0;  // times cudaEventRecord was called
  // Which of these its stream has come to, in any order, and when, by the device's clock.
  std::map<std::uint64_t, std::uint64_t> reached;

  [[nodiscard]] bool done(std::uint64_t record) const {
    return record == 0 || reached.contains(record);  // never recorded: nothing to wait for
  }
};

struct CUstream_st {
  struct Item {
    std::function<void()> run;
    std::uint64_t given_ns = 0;  // by the host's clock, which the device's does not run behind
    std::uint64_t takes_ns = 0;
    cudaEvent_t wait_for = nullptr;
    std::uint64_t wait_count = 0;
  };
  std::deque<Item> items;
  std::uint64_t now_ns = 0;  // when what it has done was over
};

namespace castor::testing {
namespace {

constexpr int kNumDevices = 2;

struct State {
  std::mutex mutex;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;                 // live
  std::vector<std::unique_ptr<CUevent_st>> dead_events;            // items may still name them
  std::map<const std::byte*, std::pair<std::size_t, int>> memory;  // device, or -1: page-locked
  std::map<const std::byte*, std::size_t> registered;
  std::map<std::string, std::size_t> num_calls;
  std::map<std::string, std::map<std::size_t, cudaError_t>> failures;
  cudaError_t device_error = cudaSuccess;
  std::uint64_t host_ns = 0;
  unsigned register_flags = 0;
};

State* state = nullptr;
thread_local int current_device = 0;

/// The failure that a test ordered for this call, or the device's.
cudaError_t called(const char* function) {
  const std::size_t call = ++state->num_calls[function];
  const auto& failures = state->failures[function];
  const auto failure = failures.find(call);
  return failure != failures.end() ? failure->second : cudaSuccess;
}

bool can_run(const CUstream_st& stream) {
  if (stream.items.empty())
    return false;
  const auto& item = stream.items.front();
  return item.wait_for == nullptr || item.wait_for->done(item.wait_count);
}

bool step_locked(CUstream_st& stream) {
  if (!can_run(stream))
    return false;
  const auto item = std::move(stream.items.front());
  stream.items.pop_front();
  stream.now_ns = std::max(stream.now_ns, item.given_ns) + item.takes_ns;
  if (item.wait_for != nullptr && item.wait_count > 0)
    stream.now_ns = std::max(stream.now_ns, item.wait_for->reached.at(item.wait_count));
  if (item.run)
    item.run();
  return true;
}

/// Runs other streams until `finished`; aborts where they wait for each other.
template <typename Finished>
void run_until(const Finished& finished) {
  while (!finished()) {
    bool moved = false;
    for (auto stream = state->streams.rbegin(); stream != state->streams.rend() && !moved; ++stream)
      moved = step_locked(**stream);
    if (!moved)
      std::abort();  // streams that wait for each other, or for an event nobody records
  }
}

}  // namespace

FakeCuda::FakeCuda() {
  if (state != nullptr)
    std::abort();
  state = new State;
  current_device = 0;
}

FakeCuda::~FakeCuda() {
  delete state;
  state = nullptr;
}

cudaStream_t FakeCuda::new_stream() {
  const std::lock_guard lock(state->mutex);
  return state->streams.emplace_back(std::make_unique<CUstream_st>()).get();
}

void FakeCuda::enqueue(cudaStream_t stream, std::function<void()> kernel, std::uint64_t takes_ns) {
  const std::lock_guard lock(state->mutex);
  stream->items.push_back(
      {.run = std::move(kernel), .given_ns = state->host_ns, .takes_ns = takes_ns});
}

void FakeCuda::host_takes(std::uint64_t nanoseconds) {
  const std::lock_guard lock(state->mutex);
  state->host_ns += nanoseconds;
}

void FakeCuda::add_device_memory(std::span<const std::byte> range, int device) {
  const std::lock_guard lock(state->mutex);
  state->memory[range.data()] = {range.size(), device};
}

void FakeCuda::add_pinned_memory(std::span<const std::byte> range) { add_device_memory(range, -1); }

bool FakeCuda::step(cudaStream_t stream) {
  const std::lock_guard lock(state->mutex);
  return step_locked(*stream);
}

void FakeCuda::run_all() {
  const std::lock_guard lock(state->mutex);
  run_until([] {
    return std::ranges::all_of(state->streams,
                               [](const auto& stream) { return stream->items.empty(); });
  });
}

std::vector<cudaStream_t> FakeCuda::streams() const {
  const std::lock_guard lock(state->mutex);
  std::vector<cudaStream_t> all;
  for (const auto& stream : state->streams)
    all.push_back(stream.get());
  return all;
}

std::size_t FakeCuda::num_queued(cudaStream_t stream) const {
  const std::lock_guard lock(state->mutex);
  return stream->items.size();
}

void FakeCuda::fail_call(const std::string& function, std::size_t n, cudaError_t error) {
  const std::lock_guard lock(state->mutex);
  state->failures[function][state->num_calls[function] + n] = error;
}

void FakeCuda::break_device(cudaError_t error) {
  const std::lock_guard lock(state->mutex);
  state->device_error = error;
}

std::size_t FakeCuda::num_live_streams() const {
  const std::lock_guard lock(state->mutex);
  return state->streams.size();
}

std::size_t FakeCuda::num_live_events() const {
  const std::lock_guard lock(state->mutex);
  return state->events.size();
}

std::size_t FakeCuda::num_calls(const std::string& function) const {
  const std::lock_guard lock(state->mutex);
  return state->num_calls[function];
}

std::size_t FakeCuda::num_registrations() const {
  const std::lock_guard lock(state->mutex);
  return state->registered.size();
}

std::size_t FakeCuda::registered_bytes() const {
  const std::lock_guard lock(state->mutex);
  std::size_t bytes = 0;
  for (const auto& [data, size] : state->registered)
    bytes += size;
  return bytes;
}

unsigned FakeCuda::last_register_flags() const {
  const std::lock_guard lock(state->mutex);
  return state->register_flags;
}

}  // namespace castor::testing

using castor::testing::called;
using castor::testing::current_device;
using castor::testing::kNumDevices;
using castor::testing::run_until;
using castor::testing::state;

// What csrc/cuda calls. Each takes the lock, counts, and fails where it was told to.
#define FAKE_CALL(function)                                              \
  const std::lock_guard lock(state->mutex);                              \
  if (const cudaError_t error = called(#function); error != cudaSuccess) \
  return error

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaErrorOfTheFake";
}
const char* cudaGetErrorString(cudaError_t) { return "as the test ordered"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  FAKE_CALL(cudaGetDevice);
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  FAKE_CALL(cudaSetDevice);
  if (device < 0 || device >= kNumDevices)
    return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  FAKE_CALL(cudaStreamCreateWithFlags);
  *stream = state->streams.emplace_back(std::make_unique<CUstream_st>()).get();
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  FAKE_CALL(cudaStreamDestroy);
  std::erase_if(state->streams, [stream](const auto& live) { return live.get() == stream; });
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  FAKE_CALL(cudaStreamSynchronize);
  if (state->device_error != cudaSuccess)
    return state->device_error;
  run_until([stream] { return stream->items.empty(); });
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  FAKE_CALL(cudaDeviceSynchronize);
  if (state->device_error != cudaSuccess)
    return state->device_error;
  run_until([] {
    return std::ranges::all_of(state->streams,
                               [](const auto& stream) { return stream->items.empty(); });
  });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  FAKE_CALL(cudaStreamWaitEvent);
  // The latest record at the time of this call; later ones do not matter.
  stream->items.push_back(
      {.run = {}, .given_ns = state->host_ns, .wait_for = event, .wait_count = event->recorded});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  FAKE_CALL(cudaEventCreateWithFlags);
  *event = state->events.emplace_back(std::make_unique<CUevent_st>()).get();
  (*event)->timed = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  FAKE_CALL(cudaEventDestroy);
  const auto place = std::ranges::find(state->events, event, &std::unique_ptr<CUevent_st>::get);
  state->dead_events.push_back(std::move(*place));
  state->events.erase(place);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FAKE_CALL(cudaEventRecord);
  const std::uint64_t record = ++event->recorded;
  stream->items.push_back(
      {.run = [event, record, stream] { event->reached.emplace(record, stream->now_ns); },
       .given_ns = state->host_ns});
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE_CALL(cudaEventQuery);
  if (state->device_error != cudaSuccess)
    return state->device_error;
  return event->done(event->recorded) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE_CALL(cudaEventSynchronize);
  if (state->device_error != cudaSuccess)
    return state->device_error;
  const std::uint64_t target = event->recorded;
  run_until([event, target] { return event->done(target); });
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  FAKE_CALL(cudaEventElapsedTime);
  if (!start->timed || !end->timed || start->recorded == 0 || end->recorded == 0)
    return cudaErrorInvalidResourceHandle;
  if (!start->done(start->recorded) || !end->done(end->recorded))
    return cudaErrorNotReady;
  const auto at = [](cudaEvent_t event) {
    return static_cast<double>(event->reached.at(event->recorded));
  };
  *milliseconds = static_cast<float>((at(end) - at(start)) / 1e6);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  FAKE_CALL(cudaMemcpyAsync);
  stream->items.push_back({.run = [=] { std::memcpy(target, source, bytes); }});
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  FAKE_CALL(cudaPointerGetAttributes);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  const auto* const address = static_cast<const std::byte*>(data);
  auto range = state->memory.upper_bound(address);
  if (range != state->memory.begin() &&
      address < (--range)->first + static_cast<std::ptrdiff_t>(range->second.first)) {
    const int device = range->second.second;
    attributes->type = device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = std::max(device, 0);
  }
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned flags) {
  FAKE_CALL(cudaHostRegister);
  const auto* const begin = static_cast<const std::byte*>(data);
  auto next = state->registered.lower_bound(begin);
  const bool overlaps_next = next != state->registered.end() && next->first < begin + bytes;
  const bool overlaps_last =
      next != state->registered.begin() &&
      std::prev(next)->first + static_cast<std::ptrdiff_t>(std::prev(next)->second) > begin;
  if (overlaps_next || overlaps_last)
    return cudaErrorHostMemoryAlreadyRegistered;
  state->registered[begin] = bytes;
  state->register_flags = flags;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* data) {
  FAKE_CALL(cudaHostUnregister);
  return state->registered.erase(static_cast<const std::byte*>(data)) == 1
             ? cudaSuccess
             : cudaErrorHostMemoryNotRegistered;
}

}  // extern "C"
