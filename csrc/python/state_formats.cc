#include "python/state_formats.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <tuple>

#include "core/error.h"
#include "optim/state_convert.h"
#include "parallel/make_executor.h"
#include "python/bindings.h"
#include "python/names.h"
#include "python/state_tensors.h"
#include "torch/tensor_gate.h"

namespace py = pybind11;

namespace castor {
namespace {

std::size_t numel_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

/// Sized blocks are in the order of memory, so that any dense layout will do.
void check(const at::Tensor& tensor, at::ScalarType type, const at::Tensor& like,
           const char* name) {
  if (tensor.scalar_type() != type || !tensor.device().is_cpu() || tensor.sizes() != like.sizes() ||
      tensor.strides() != like.strides() || !tensor.is_non_overlapping_and_dense()) {
    throw InvalidArgument(std::string(name) + " must be a dense CPU tensor of type " +
                          toString(type) + " with the shape and strides of the others");
  }
}

MomentArrays arrays_of(StateFormat format, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                       const std::optional<at::Tensor>& scales) {
  check(exp_avg, moment_type(format), exp_avg, "exp_avg");
  check(exp_avg_sq, moment_type(format), exp_avg, "exp_avg_sq");
  return {.format = format,
          .exp_avg = exp_avg.mutable_data_ptr(),
          .exp_avg_sq = exp_avg_sq.mutable_data_ptr(),
          .scales = scales_of(scales, format, numel_of(exp_avg), at::kCPU),
          .numel = numel_of(exp_avg)};
}

at::Tensor split_master(const at::Tensor& master) {
  check(master, at::kFloat, master, "master");
  at::Tensor remainder = at::empty_like(master, at::kShort);
  split_masters(&shared_executor(), remainder.data_ptr<std::int16_t>(), master.data_ptr<float>(),
                numel_of(master));
  return remainder;
}

at::Tensor join_master(const at::Tensor& param, const at::Tensor& remainder) {
  check(param, at::kBFloat16, param, "param");
  check(remainder, at::kShort, param, "remainder");
  at::Tensor master = at::empty_like(param, at::kFloat);
  const at::Tensor own = readable(param);
  join_masters(&shared_executor(), master.data_ptr<float>(),
               static_cast<const std::uint16_t*>(own.const_data_ptr()),
               remainder.data_ptr<std::int16_t>(), numel_of(param));
  return master;
}

std::tuple<at::Tensor, at::Tensor> load_moment_tensors(StateFormat format,
                                                       const at::Tensor& exp_avg,
                                                       const at::Tensor& exp_avg_sq,
                                                       const std::optional<at::Tensor>& scales) {
  const MomentArrays from = arrays_of(format, exp_avg, exp_avg_sq, scales);
  at::Tensor m = at::empty_like(exp_avg, at::kFloat);
  at::Tensor v = at::empty_like(exp_avg_sq, at::kFloat);
  load_moments(&shared_executor(), from, m.data_ptr<float>(), v.data_ptr<float>());
  return {m, v};
}

void store_moment_tensors(StateFormat format, const at::Tensor& exp_avg,
                          const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& scales,
                          const at::Tensor& from_exp_avg, const at::Tensor& from_exp_avg_sq) {
  const MomentArrays to = arrays_of(format, exp_avg, exp_avg_sq, scales);
  check(from_exp_avg, at::kFloat, exp_avg, "the exp_avg to store");
  check(from_exp_avg_sq, at::kFloat, exp_avg, "the exp_avg_sq to store");
  store_moments(&shared_executor(), to, from_exp_avg.data_ptr<float>(),
                from_exp_avg_sq.data_ptr<float>());
}

}  // namespace

Executor& shared_executor() {
  static const std::unique_ptr<Executor> executor = make_executor();
  return *executor;
}

void bind_state_formats(py::module_& module) {
  module.attr("MOMENT_BLOCK") = kMomentBlock;
  module.def("split_master", &split_master, py::arg("master"));
  module.def("join_master", &join_master, py::arg("param"), py::arg("remainder"));
  module.def("load_moments", &load_moment_tensors, py::arg("state_format"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("scales"));
  module.def("store_moments", &store_moment_tensors, py::arg("state_format"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("scales"), py::arg("from_exp_avg"),
             py::arg("from_exp_avg_sq"));
}

}  // namespace castor
