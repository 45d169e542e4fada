#include "torch/optimizer_state.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "torch/session.h"

namespace py = pybind11;

namespace castor {
namespace {

/// What is neither moved nor read by an operator of torch waits for updates under way by itself.
OptimizerState& settled(Session& session) {
  session.settle();
  return session.optimizer_state();
}

}  // namespace

void bind_optimizer_state(py::class_<Session, std::shared_ptr<Session>>& session) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  session
      .def_property_readonly(
          "optim_state_format",
          [](Session& self) { return std::string(to_string(self.optimizer_state().format())); })
      .def(
          "zero_moments", [](Session& self) { settled(self).zero_moments(); }, released)
      .def(
          "set_rounding",
          [](Session& self, std::uint64_t seed, std::vector<std::uint64_t> streams) {
            self.optimizer_state().set_rounding(seed, std::move(streams));
          },
          py::arg("seed"), py::arg("streams"))
      .def(
          "adopt",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            settled(self).adopt(ParamId{param}, values);
          },
          released)
      .def(
          "set_master",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            return settled(self).set_master(ParamId{param}, values);
          },
          released)
      .def(
          "before_overwrite",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            settled(self).before_overwrite(ParamId{param}, values);
          },
          released)
      .def("moments",
           [](Session& self, std::uint32_t param) { return self.moments(ParamId{param}); })
      .def(
          "master_view",
          [](Session& self, std::uint32_t param) {
            return settled(self).master_view(ParamId{param});
          },
          released)
      .def(
          "master",
          [](Session& self, std::uint32_t param) { return settled(self).master(ParamId{param}); },
          released);
}

}  // namespace castor
