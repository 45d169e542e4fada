// castor._C.RankGroup: what Python's side of the ranks tells the others.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/collectives.h"
#include "core/error.h"
#include "dist/group_collectives.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace castor {
namespace {

/// What each rank gives, in rank order; of any size each.
std::vector<py::bytes> gather_bytes(GroupCollectives& ranks, const std::string& own) {
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
    throw InvalidArgument("broadcast: takes a contiguous tensor in memory of the host");
  }
  if (values.numel() > 0) {
    ranks.broadcast({static_cast<std::byte*>(values.data_ptr()), values.nbytes()});
  }
}

}  // namespace

// Not torch.distributed's own functions: gloo's threads would release the Python objects of their
// tensors some time after the call, and a process that ends just then is aborted.
void bind_rank_group(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<GroupCollectives>(module, "RankGroup")
      .def(py::init<const std::string&>(), py::arg("group"))
      .def("gather", &gather_bytes, py::arg("own"))
      .def("broadcast", &broadcast, py::arg("values"), Released())
      .def(
          "meet", [](GroupCollectives& ranks) { meet(ranks); }, Released());
}

}  // namespace castor
