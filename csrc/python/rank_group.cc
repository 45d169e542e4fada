// castor._C.RankGroup: what Python's side of the ranks tells the others.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "c10d/device_collectives.h"
#include "c10d/device_sums.h"
#include "c10d/group_collectives.h"
#include "c10d/heartbeats.h"
#include "c10d/linked_groups.h"
#include "c10d/on_host.h"
#include "core/collectives.h"
#include "core/error.h"
#include "python/bindings.h"
#include "python/names.h"
#include "python/state_tensors.h"
#include "ranks/rank_sums.h"
#include "ranks/rank_waits.h"

namespace py = pybind11;

namespace castor {
namespace {

/// What each rank gives, in rank order; of any size each.
std::vector<py::bytes> gather_bytes(Collectives& ranks, const std::string& own, std::string place) {
  std::vector<std::uint64_t> sizes;
  std::size_t longest = 0;
  std::string all;
  {
    const py::gil_scoped_release released;
    ranks.set_place(std::move(place));
    sizes = gather(ranks, std::uint64_t{own.size()});
    longest = *std::max_element(sizes.begin(), sizes.end());
    std::string padded = own;
    padded.resize(longest);
    all.resize(longest * ranks.size());
    if (longest > 0) {
      ranks.all_gather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
    }
  }
  std::vector<py::bytes> values;
  for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
    values.emplace_back(all.data() + rank * longest, sizes[rank]);
  }
  return values;
}

void broadcast(GroupCollectives& ranks, const at::Tensor& values) {
  if (!values.is_cpu() || !values.is_contiguous()) {
    throw InvalidArgument("a group sends contiguous tensors in memory of the host");
  }
  ranks.set_place("takes rank 0's weights");
  if (values.numel() > 0) {
    ranks.broadcast(OnHost::values_of(values).bytes());
  }
}

constexpr const char* kSumming = "sums the outputs of tensor-parallel layers";

/// Collectives of tensors among the ranks that share a model. Tensors on a device go to the other
/// devices over a process group for them (use_device_group), where there is one; else through
/// page-locked memory of the host. The sums have the same bits.
class RankTensors {
 public:
  RankTensors(const std::string& group, const std::optional<std::string>& memory_mark)
      : linked_(link_groups({&group, 1}, memory_mark, waits_of_process())), sums_(ranks()) {}

  [[nodiscard]] const std::string& link() const noexcept { return linked_.link; }
  [[nodiscard]] Collectives& ranks() const noexcept { return *linked_.groups[0]; }
  void use_device_group(const DeviceGroup& group, const std::string& device, Reduction reduction) {
    device_ = std::make_unique<DeviceCollectives>(group.connection(), c10::Device(device), ranks(),
                                                  reduction);
  }
  [[nodiscard]] std::string device_backend() const { return device_ ? device_->backend() : ""; }
  [[nodiscard]] bool sends_from_device(const at::Tensor& tensor) const noexcept {
    return device_ && device_->takes(tensor);
  }

  [[nodiscard]] bool backend_sums(const at::Tensor& tensor) const noexcept {
    return sends_from_device(tensor) && device_->reduction() == Reduction::kBackend;
  }

  void reduce_scatter(const at::Tensor& values, const at::Tensor& into) {
    if (!backend_sums(values)) {
      throw InvalidArgument("only a backend that adds up reduce-scatters tensors");
    }
    ranks().set_place(kSumming);
    device_->reduce_scatter(values, into, DeviceCollectives::Result::kSum);
  }
  void all_reduce(const at::Tensor& values) {
    ranks().set_place(kSumming);
    if (sends_from_device(values)) {
      device_->all_reduce(values);
      return;
    }
    const OnHost host = OnHost::values_of(values);
    sums_.sum(host.bytes(), scalar_type_of(values));
    host.send();
  }
  [[nodiscard]] DeviceWork begin_all_reduce(const at::Tensor& values) {
    if (!sends_from_device(values)) {
      throw InvalidArgument("only a process group for devices adds tensors up asynchronously");
    }
    ranks().set_place(kSumming);
    return device_->begin_all_reduce(values);
  }
  void all_gather(const at::Tensor& own, const at::Tensor& into) {
    if (into.nbytes() != own.nbytes() * ranks().size()) {
      throw InvalidArgument("what is gathered has another size than what the ranks give");
    }
    ranks().set_place("gathers shards of activations");
    if (own.nbytes() == 0) {
      return;
    }
    if (sends_from_device(own)) {
      device_->all_gather(own, into);
      return;
    }
    const OnHost received = OnHost::room_for(into);
    ranks().all_gather(OnHost::values_of(own).bytes(), received.bytes());
    received.send();
  }
  void all_to_all(const at::Tensor& sent, const at::Tensor& into) {
    if (sent.nbytes() != into.nbytes() || sent.nbytes() % ranks().size() != 0) {
      throw InvalidArgument("all_to_all was given " + std::to_string(sent.nbytes()) +
                            " bytes for " + std::to_string(into.nbytes()) +
                            ", which are no equal shards for " + std::to_string(ranks().size()) +
                            " ranks");
    }
    ranks().set_place("exchanges tokens, or heads, of a layer");
    if (sent.nbytes() == 0) {
      return;
    }
    if (sends_from_device(sent)) {
      device_->all_to_all(sent, into);
      return;
    }
    const OnHost received = OnHost::room_for(into);
    ranks().all_to_all(OnHost::values_of(sent).bytes(), received.bytes());
    received.send();
  }
  void ring_shift(const at::Tensor& sent, const at::Tensor& into) {
    check_ring_shift(sent, into);
    if (sent.nbytes() > 0) {
      const OnHost received = OnHost::room_for(into);
      ranks().ring_shift(OnHost::values_of(sent).bytes(), received.bytes());
      received.send();
    }
  }
  [[nodiscard]] DeviceWork begin_ring_shift(const at::Tensor& sent, const at::Tensor& into) {
    check_ring_shift(sent, into);
    if (!sends_from_device(sent)) {
      throw InvalidArgument("only a process group for devices passes tensors on asynchronously");
    }
    return device_->begin_ring_shift(sent, into);
  }

  void expect_messages(bool expected) {
    if (device_) {
      device_->expect_messages(expected);
    }
  }
  void look() noexcept {
    if (device_) {
      device_->look();
    }
  }
  void abort_device(const std::string& why) noexcept {
    if (device_) {
      device_->abort(why);
    }
  }
  [[nodiscard]] std::string lost() const { return device_ ? device_->aborted() : ""; }
  void leave() noexcept {
    ranks().leave();
    abort_device("it has let go of the model itself");
  }

 private:
  void check_ring_shift(const at::Tensor& sent, const at::Tensor& into) const {
    if (sent.nbytes() != into.nbytes()) {
      throw InvalidArgument("what is passed on has another size than what comes for it");
    }
    ranks().set_place("passes keys and values on in an attention");
  }

  const LinkedGroups linked_;
  RankSums sums_;
  std::unique_ptr<DeviceCollectives> device_;  // nullptr: device memory goes through the host
};

/// Python waits for other ranks, through what is not castor's.
class PythonWait {
 public:
  PythonWait(std::size_t rank, std::size_t size, std::string place, std::string awaited)
      : place_(waits_of_process(), rank, size), awaited_(std::move(awaited)) {
    place_.set(std::move(place));
  }
  void enter() {
    wait_.emplace(place_.wait([this] { return awaited_; }));
  }
  void exit() noexcept { wait_.reset(); }

 private:
  RankPlace place_;
  const std::string awaited_;
  std::optional<RankWaits::Wait> wait_;
};

}  // namespace

const std::shared_ptr<RankWaits>& waits_of_process() {
  static const auto waits = std::make_shared<RankWaits>();
  return waits;
}

// Not torch.distributed's own functions: gloo's threads would release the Python objects of their
// tensors some time after the call, and a process that ends just then is aborted.
void bind_rank_group(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<GroupCollectives>(module, "RankGroup")
      .def(py::init([](const std::string& group) {
             return std::make_unique<GroupCollectives>(group, waits_of_process());
           }),
           py::arg("group"))
      .def(
          "gather",
          [](GroupCollectives& ranks, const std::string& own, std::string place) {
            return gather_bytes(ranks, own, std::move(place));
          },
          py::arg("own"), py::arg("place"))
      .def("broadcast", &broadcast, py::arg("values"), Released())
      .def(
          "barrier",
          [](GroupCollectives& ranks, std::string place) {
            ranks.set_place(std::move(place));
            barrier(ranks);
          },
          py::arg("place"), Released());
  py::class_<RankTensors>(module, "RankTensors")
      .def(py::init<const std::string&, const std::optional<std::string>&>(), py::arg("group"),
           py::kw_only(), py::arg("memory_mark"), Released())
      .def_property_readonly("link", &RankTensors::link)
      .def("all_reduce", &RankTensors::all_reduce, py::arg("values"), Released())
      .def("begin_all_reduce", &RankTensors::begin_all_reduce, py::arg("values"), Released())
      .def("backend_sums", &RankTensors::backend_sums, py::arg("tensor"))
      .def("reduce_scatter", &RankTensors::reduce_scatter, py::arg("values"), py::arg("into"),
           Released())
      .def("all_gather", &RankTensors::all_gather, py::arg("own"), py::arg("into"), Released())
      .def(
          "gather_bytes",
          [](const RankTensors& tensors, const std::string& own, std::string place) {
            return gather_bytes(tensors.ranks(), own, std::move(place));
          },
          py::arg("own"), py::arg("place"))
      .def("all_to_all", &RankTensors::all_to_all, py::arg("sent"), py::arg("into"), Released())
      .def("ring_shift", &RankTensors::ring_shift, py::arg("sent"), py::arg("into"), Released())
      .def("begin_ring_shift", &RankTensors::begin_ring_shift, py::arg("sent"), py::arg("into"),
           Released())
      .def("use_device_group", &RankTensors::use_device_group, py::arg("group"), py::arg("device"),
           py::kw_only(), py::arg("reduction"), Released())
      .def_property_readonly("device_backend", &RankTensors::device_backend)
      .def("sends_from_device", &RankTensors::sends_from_device, py::arg("tensor"))
      .def("expect_messages", &RankTensors::expect_messages, py::arg("expected"), Released())
      .def("look", &RankTensors::look, Released())
      .def("lost", &RankTensors::lost, Released())
      .def("abort_device", &RankTensors::abort_device, py::arg("why"), Released())
      .def("leave", &RankTensors::leave, Released());
  py::class_<DeviceConnection, std::shared_ptr<DeviceConnection>>(module, "DeviceConnection");
  py::class_<DeviceGroup>(module, "DeviceGroup")
      .def(py::init([](const std::string& name, const std::string& device) {
             return std::make_unique<DeviceGroup>(name, c10::Device(device));
           }),
           py::arg("name"), py::arg("device"))
      .def("connection", &DeviceGroup::connection)
      .def("used", &DeviceGroup::used)
      .def("aborted", &DeviceGroup::aborted, Released())
      .def("abort", &DeviceGroup::abort, py::arg("why"), Released());
  py::class_<DeviceSums, std::shared_ptr<DeviceSums>>(module, "DeviceSums")
      .def(py::init([](const DeviceGroup& group, const std::string& device, Reduction reduction) {
             return std::make_shared<DeviceSums>(group.connection(), c10::Device(device),
                                                 reduction);
           }),
           py::arg("group"), py::arg("device"), py::kw_only(), py::arg("reduction"))
      .def("look", &DeviceSums::look, Released());
  py::class_<DeviceWork>(module, "DeviceWork").def("wait", &DeviceWork::wait, Released());
  py::class_<PythonWait>(module, "RankWait")
      .def(py::init<std::size_t, std::size_t, std::string, std::string>(), py::arg("rank"),
           py::arg("size"), py::kw_only(), py::arg("place"), py::arg("awaited"))
      .def("__enter__", &PythonWait::enter, Released())
      .def("__exit__",
           [](PythonWait& wait, const py::args&) { without_gil([&] { wait.exit(); }); });
  py::class_<Heartbeats>(module, "Heartbeats")
      .def(py::init([](std::string group, std::string host, double interval_seconds,
                       double seconds_until_lost) {
             const auto time = [](double seconds) {
               return std::chrono::duration_cast<std::chrono::milliseconds>(
                   std::chrono::duration<double>(seconds));
             };
             return std::make_unique<Heartbeats>(
                 Heartbeats::Options{.group = std::move(group),
                                     .host = std::move(host),
                                     .interval = time(interval_seconds),
                                     .silence = time(seconds_until_lost)},
                 waits_of_process());
           }),
           py::kw_only(), py::arg("group"), py::arg("host"), py::arg("interval_seconds"),
           py::arg("seconds_until_lost"), Released())
      .def("look", &Heartbeats::look, Released())
      .def("end", &Heartbeats::end, Released());
  module.def(
      "long_wait",
      [](int looks, const std::vector<std::uint64_t>& served) -> std::optional<py::tuple> {
        // With Python's lock: a daemon thread that asks for it when Python ends is ended itself,
        // here within destructors. Nobody who holds a mutex that is waited for needs it.
        const std::optional<LongWait> told = waits_of_process()->look(looks, served);
        if (!told) {
          return std::nullopt;
        }
        return py::make_tuple(told->rank, told->size, told->place, told->awaited, told->last,
                              told->thread);
      },
      py::arg("looks"), py::kw_only(), py::arg("served"));
}

}  // namespace castor
