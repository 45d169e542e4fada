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

ParamId id(std::uint32_t param) { return ParamId{param}; }

/// For what reads or writes the parameter's state without torch's operators.
OptimizerState& settled(Session& session, std::uint32_t param) {
  session.settle(id(param));
  return session.optimizer_state();
}

}  // namespace

void bind_optimizer_state(py::class_<Session, std::shared_ptr<Session>>& session) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  session
      .def_property_readonly("optim_state_format",
                             [](const Session& self) {
                               return std::string(to_string(self.optimizer_state().format()));
                             })
      .def(
          "zero_moments",
          [](Session& self) {
            self.settle();
            self.optimizer_state().zero_moments();
          },
          released)
      .def(
          "set_rounding",
          [](Session& self, std::uint64_t seed, std::vector<std::uint64_t> streams) {
            self.optimizer_state().set_rounding(seed, std::move(streams));
          },
          py::arg("seed"), py::arg("streams"), released)
      .def(
          "adopt",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            settled(self, param).adopt(id(param), values);
          },
          released)
      .def(
          "set_master",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            return settled(self, param).set_master(id(param), values);
          },
          released)
      .def(
          "before_overwrite",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            const auto visit = self.visit(id(param), /*writes=*/false);
            self.optimizer_state().before_overwrite(id(param), values);
          },
          released)
      .def(
          "stored",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().stored(self.layout().place(id(param)).chunk);
          },
          released)
      .def(
          "home", [](Session& self, std::uint32_t param) { return self.home(id(param)); }, released)
      .def(
          "shown",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().shown(self.layout().place(id(param)).chunk);
          },
          released)
      .def(
          "weight_stored",
          [](Session& self, std::uint32_t param) {
            return self.chunks().stored(self.layout().place(id(param)).chunk);
          },
          released)
      .def(
          "read_moments",
          [](Session& self, std::uint32_t param) {
            return settled(self, param).read_moments(id(param));
          },
          released)
      .def(
          "write_moments",
          [](Session& self, std::uint32_t param, const std::vector<at::Tensor>& moments) {
            settled(self, param).write_moments(id(param), moments);
          },
          released)
      .def(
          "moments", [](Session& self, std::uint32_t param) { return self.moments(id(param)); },
          released)
      .def(
          "moment_scales",
          [](Session& self, std::uint32_t param) { return self.moment_scales(id(param)); },
          released)
      .def(
          "master_view",
          [](Session& self, std::uint32_t param) {
            return settled(self, param).master_view(id(param));
          },
          released)
      .def(
          "master",
          [](Session& self, std::uint32_t param) {
            const auto visit = self.visit(id(param), /*writes=*/false);
            return self.optimizer_state().master(id(param));
          },
          released);
}

}  // namespace castor
