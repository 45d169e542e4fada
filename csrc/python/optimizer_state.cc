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

}  // namespace

void bind_optimizer_state(py::class_<Session, std::shared_ptr<Session>>& session) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  session
      .def_property_readonly("optim_state_format",
                             [](const Session& self) {
                               return std::string(to_string(self.optimizer_state().format()));
                             })
      .def(
          "zero_moments", [](Session& self) { self.optimizer_state().zero_moments(); }, released)
      .def(
          "set_rounding",
          [](Session& self, std::uint64_t seed, std::vector<std::uint64_t> streams) {
            self.optimizer_state().set_rounding(seed, std::move(streams));
          },
          py::arg("seed"), py::arg("streams"))
      .def(
          "adopt",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            self.optimizer_state().adopt(id(param), values);
          },
          released)
      .def(
          "set_master",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            return self.optimizer_state().set_master(id(param), values);
          },
          released)
      .def(
          "before_overwrite",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            self.optimizer_state().before_overwrite(id(param), values);
          },
          released)
      .def("moments", [](const Session& self,
                         std::uint32_t param) { return self.optimizer_state().moments(id(param)); })
      .def("moment_scales",
           [](const Session& self, std::uint32_t param) {
             return self.optimizer_state().moment_scales(id(param));
           })
      .def("master_view",
           [](const Session& self, std::uint32_t param) {
             return self.optimizer_state().master_view(id(param));
           })
      .def("master", [](const Session& self, std::uint32_t param) {
        return self.optimizer_state().master(id(param));
      });
}

}  // namespace castor
