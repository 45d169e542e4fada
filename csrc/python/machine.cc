// What castor finds on a machine and how fast its memory is, for castor.doctor and the benchmarks.
#include <unistd.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "core/memory_tier.h"
#include "host/host_arena.h"
#include "host/numa.h"
#include "optim/bandwidth.h"
#include "parallel/idle_thread.h"
#include "parallel/make_executor.h"
#include "python/bindings.h"
#include "torch/cpu_backend.h"

namespace py = pybind11;

namespace castor {
namespace {

/// An idle thread that the thread which makes it prefers, until it leaves it; none where the system
/// has no more threads.
class PreferredThread {
 public:
  PreferredThread() {
    try {
      thread_ = std::make_unique<IdleThread>();
    } catch (const std::system_error&) {
      return;  // who has made this does its work itself
    }
    IdleThread::prefer(thread_.get());
  }
  ~PreferredThread() { end(); }
  PreferredThread(const PreferredThread&) = delete;
  PreferredThread& operator=(const PreferredThread&) = delete;

  [[nodiscard]] double seconds() const { return thread_ ? thread_->seconds() : 0.0; }
  void leave() noexcept {
    IdleThread::prefer(nullptr);
    end();
  }

 private:
  void end() noexcept {
    if (::getpid() != process_) {
      static_cast<void>(thread_.release());  // a forked child has no such thread to wait for
    }
    thread_.reset();
  }

  const int process_ = ::getpid();  // that made it
  std::unique_ptr<IdleThread> thread_;
};

/// (number of the operating system, bytes, cores) of each node; nullopt without hwloc.
std::optional<std::vector<std::tuple<unsigned, std::size_t, std::size_t>>> numa_nodes() {
  if (!NumaTopology::available()) {
    return std::nullopt;
  }
  const NumaTopology topology;
  std::vector<std::tuple<unsigned, std::size_t, std::size_t>> nodes;
  for (const NumaNode& node : topology.nodes()) {
    nodes.emplace_back(node.os_index, node.memory_bytes, node.num_pus);
  }
  return nodes;
}

/// Of all caches of the last level together; 0 where that is not known.
std::size_t cache_bytes() { return NumaTopology::available() ? NumaTopology().cache_bytes() : 0; }

double in_place(std::size_t num_floats, std::size_t repetitions) {
  MemoryTier host(TierKind::kHost, num_floats * sizeof(float), make_host_arena());
  const Block block = host.allocate(num_floats * sizeof(float), "");
  const std::unique_ptr<Executor> executor = make_executor();
  return in_place_bandwidth(*executor, {reinterpret_cast<float*>(block.data()), num_floats},
                            repetitions);
}

double adam(std::size_t num_params, std::size_t repetitions, std::size_t num_threads) {
  const std::size_t num_floats = 4 * num_params;
  MemoryTier host(TierKind::kHost, num_floats * sizeof(float), make_host_arena());
  const Block block = host.allocate(num_floats * sizeof(float), "");
  const std::unique_ptr<Executor> executor = make_executor(num_threads);
  return adam_bandwidth(*executor, {reinterpret_cast<float*>(block.data()), num_floats},
                        repetitions);
}

/// Bytes copied per second, each counted once: what the CPU device's link does at best.
double copy_bandwidth(std::size_t num_bytes, std::size_t repetitions) {
  if (num_bytes == 0 || repetitions == 0) {
    throw InvalidArgument("copy_bandwidth: needs at least 1 byte and at least 1 repetition");
  }
  MemoryTier host(TierKind::kHost, 2 * num_bytes, make_host_arena());
  const Block source = host.allocate(num_bytes, "");
  const Block target = host.allocate(num_bytes, "");
  std::memset(source.data(), 1, num_bytes);
  const std::unique_ptr<CopyEngine> engine = make_cpu_copy_engine();
  const auto copy = [&] {
    engine->wait(engine->submit({.source = {source.data(), num_bytes},
                                 .target = {target.data(), num_bytes},
                                 .direction = CopyDirection::kHostToDevice}));
  };
  return static_cast<double>(num_bytes) / median_seconds(copy, repetitions);
}

}  // namespace

void bind_machine(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  module.def("numa_nodes", &numa_nodes);
  module.def("cache_bytes", &cache_bytes);
  module.def("host_arena", [] { return make_host_arena()->description(); });
  py::class_<PreferredThread>(module, "IdleThread")
      .def(py::init<>())
      .def("leave", &PreferredThread::leave, released)
      .def_property_readonly("seconds", &PreferredThread::seconds);
  module.def("in_place_bandwidth", &in_place, py::arg("num_floats"), py::arg("repetitions"),
             released);
  module.def("adam_bandwidth", &adam, py::arg("num_params"), py::arg("repetitions"),
             py::arg("num_threads") = 0, released);
  module.def("copy_bandwidth", &copy_bandwidth, py::arg("num_bytes"), py::arg("repetitions"),
             released);
}

}  // namespace castor
