// castor._C.RankGroup: what Python's side of the ranks tells the others.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/collectives.h"
#include "core/error.h"
#include "dist/group_collectives.h"
#include "dist/linked_groups.h"
#include "dist/on_host.h"
#include "dist/rank_sums.h"
#include "python/bindings.h"
#include "python/state_tensors.h"

namespace py = pybind11;

namespace castor {
namespace {

/// What each rank gives, in rank order; of any size each.
std::vector<py::bytes> gather_bytes(Collectives& ranks, const std::string& own) {
  std::vector<std::uint64_t> sizes;
  std::size_t longest = 0;
  std::string all;
  {
    const py::gil_scoped_release released;
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
  if (values.numel() > 0) {
    ranks.broadcast(OnHost::values_of(values).bytes());
  }
}

/// Activations of the ranks that have a part of each layer. Contiguous; those on a device go
/// through page-locked memory of the host, where sums are made, so that the bits are the same.
class RankTensors {
 public:
  RankTensors(const std::string& group, const std::optional<std::string>& memory_mark)
      : linked_(link_groups({&group, 1}, memory_mark)), sums_(ranks()) {}

  [[nodiscard]] const std::string& link() const noexcept { return linked_.link; }
  [[nodiscard]] Collectives& ranks() const noexcept { return *linked_.groups[0]; }
  void sum(const at::Tensor& values) {
    const OnHost host = OnHost::values_of(values);
    sums_.sum(host.bytes(), scalar_type_of(values));
    host.send();
  }
  void gather(const at::Tensor& own, const at::Tensor& into) {
    if (into.nbytes() != own.nbytes() * ranks().size()) {
      throw InvalidArgument("what is gathered has another size than what the ranks give");
    }
    if (own.nbytes() > 0) {
      const OnHost received = OnHost::room_for(into);
      ranks().all_gather(OnHost::values_of(own).bytes(), received.bytes());
      received.send();
    }
  }
  void exchange(const at::Tensor& sent, const at::Tensor& into) {
    if (sent.nbytes() != into.nbytes() || sent.nbytes() % ranks().size() != 0) {
      throw InvalidArgument("what is exchanged is no equal part for each rank");
    }
    if (sent.nbytes() > 0) {
      const OnHost received = OnHost::room_for(into);
      ranks().all_to_all(OnHost::values_of(sent).bytes(), received.bytes());
      received.send();
    }
  }
  void pass_on(const at::Tensor& sent, const at::Tensor& into) {
    if (sent.nbytes() != into.nbytes()) {
      throw InvalidArgument("what is passed on has another size than what comes for it");
    }
    if (sent.nbytes() > 0) {
      const OnHost received = OnHost::room_for(into);
      ranks().pass_on(OnHost::values_of(sent).bytes(), received.bytes());
      received.send();
    }
  }

 private:
  const LinkedGroups linked_;
  RankSums sums_;
};

}  // namespace

// Not torch.distributed's own functions: gloo's threads would release the Python objects of their
// tensors some time after the call, and a process that ends just then is aborted.
void bind_rank_group(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<GroupCollectives>(module, "RankGroup")
      .def(py::init<const std::string&>(), py::arg("group"))
      .def(
          "gather",
          [](GroupCollectives& ranks, const std::string& own) { return gather_bytes(ranks, own); },
          py::arg("own"))
      .def("broadcast", &broadcast, py::arg("values"), Released())
      .def(
          "meet", [](GroupCollectives& ranks) { meet(ranks); }, Released());
  py::class_<RankTensors>(module, "RankTensors")
      .def(py::init<const std::string&, const std::optional<std::string>&>(), py::arg("group"),
           py::kw_only(), py::arg("memory_mark"), Released())
      .def_property_readonly("link", &RankTensors::link)
      .def("sum", &RankTensors::sum, py::arg("values"), Released())
      .def("gather", &RankTensors::gather, py::arg("own"), py::arg("into"), Released())
      .def(
          "gather_bytes",
          [](const RankTensors& tensors, const std::string& own) {
            return gather_bytes(tensors.ranks(), own);
          },
          py::arg("own"))
      .def("exchange", &RankTensors::exchange, py::arg("sent"), py::arg("into"), Released())
      .def("pass_on", &RankTensors::pass_on, py::arg("sent"), py::arg("into"), Released())
      .def(
          "leave", [](RankTensors& tensors) { tensors.ranks().leave(); }, Released());
}

}  // namespace castor
