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
#include "python/names.h"
#include "torch/session.h"

namespace py = pybind11;

namespace castor {
namespace {

ParamId id(std::uint32_t param) { return ParamId{param}; }

void set_rounding(Session& session, std::uint64_t seed, std::vector<std::uint64_t> streams) {
  session.updates().chunk_updates().set_rounding(seed, std::move(streams));
}

/// For what reads the parameter's state without torch's operators.
OptimizerState& settled(Session& session, std::uint32_t param) {
  session.settle(id(param));
  return session.optimizer_state();
}

/// ... or writes it.
OptimizerState& settled_to_write(Session& session, std::uint32_t param) {
  session.reads().wait(session.layout().place(id(param)).chunk);
  return settled(session, param);
}

}  // namespace

void bind_optimizer_state(SessionClass& session) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  session
      .def_property_readonly(
          "optim_state_format",
          [](const Session& self) {
            return std::string(to_string(self.optimizer_state().values().format()));
          })
      .def(
          "state_names",
          [](const Session& self, std::uint32_t param) {
            return self.optimizer_state().values().names(id(param));
          },
          py::arg("param"))
      .def(
          "state_format",
          [](const Session& self, std::uint32_t param) {
            return self.optimizer_state().values().format(id(param));
          },
          py::arg("param"))
      .def(
          "zero_states",
          [](Session& self) {
            self.settle();
            self.optimizer_state().zero();
          },
          released)
      .def("set_rounding", set_rounding, py::arg("seed"), py::arg("streams"), released)
      .def(
          "adopt",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            settled_to_write(self, param).adopt(id(param), values);
          },
          released)
      .def(
          "set_master",
          [](Session& self, std::uint32_t param, const at::Tensor& values) {
            return settled_to_write(self, param).set_master(id(param), values);
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
            return self.optimizer_state().places().stored(self.layout().place(id(param)).chunk);
          },
          released)
      .def(
          "host_storage",
          [](Session& self, std::uint32_t param) { return self.host_storage(id(param)); }, released)
      .def(
          "shown",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().places().shown(self.layout().place(id(param)).chunk);
          },
          released)
      .def(
          "weight_stored",
          [](Session& self, std::uint32_t param) {
            return self.chunks().stored(self.layout().place(id(param)).chunk);
          },
          released)
      .def(
          "weight_is_own",
          [](Session& self, std::uint32_t param) {
            const ChunkId chunk = self.layout().place(id(param)).chunk;
            const auto& payload = self.chunks().manager().payload(chunk, PayloadKind::kParam);
            const bool shared = payload != nullptr && payload->needs_copies();
            return !shared && !self.optimizer_state().places().sharded(chunk);
          },
          released)
      .def(
          "read_states",
          [](Session& self, std::uint32_t param) { return settled(self, param).read(id(param)); },
          released)
      .def(
          "serve_states",
          [](Session& self) {
            if (SessionRanks* const ranks = self.updates().ranks()) {
              self.settle();
              ranks->states().serve();
            }
          },
          released)
      .def(
          "end_service",
          [](Session& self) {
            if (SessionRanks* const ranks = self.updates().ranks()) {
              ranks->states().end_service();
            }
          },
          released)
      .def(
          "write_states",
          [](Session& self, std::uint32_t param, const std::vector<at::Tensor>& states) {
            settled_to_write(self, param).write(id(param), states);
          },
          released)
      .def(
          "states", [](Session& self, std::uint32_t param) { return self.states(id(param)); },
          released)
      .def(
          "release_states",
          [](Session& self, std::uint32_t param) { self.release_states(id(param)); }, released)
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

void bind_saves(SessionClass& session) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  session
      .def(
          "begin_reads",
          [](Session& self) {
            std::vector<std::uint32_t> not_held;
            for (const ChunkId chunk : self.begin_reads()) {
              not_held.push_back(static_cast<std::uint32_t>(index(chunk)));
            }
            return not_held;
          },
          released)
      .def(
          "end_read", [](Session& self, std::uint32_t chunk) { self.reads().end(ChunkId{chunk}); },
          py::arg("chunk"), released)
      .def(
          "begin_copies",
          [](Session& self, const std::vector<std::uint32_t>& chunks, bool states,
             std::size_t most) {
            std::vector<ChunkId> ids;
            for (const std::uint32_t chunk : chunks) {
              ids.push_back(ChunkId{chunk});
            }
            return self.updates().copies().begin(ids, states, most);
          },
          py::arg("chunks"), py::kw_only(), py::arg("states"), py::arg("most"), released)
      .def(
          "finish_copies", [](Session& self) { self.updates().copies().finish_all(); }, released)
      .def(
          "end_reads", [](Session& self) { self.updates().copies().end(); }, released)
      .def(
          "await_read",
          [](Session& self, std::uint32_t chunk) { self.reads().wait(ChunkId{chunk}); },
          py::arg("chunk"), released)
      .def_property_readonly("reads_awaited",
                             [](Session& self) { return self.updates().copies().any_awaited(); })
      .def("chunk_of",
           [](const Session& self, std::uint32_t param) {
             return static_cast<std::uint32_t>(index(self.layout().place(id(param)).chunk));
           })
      .def(
          "saved_weights",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().saved_weights(id(param));
          },
          released)
      .def(
          "saved_states",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().saved_states(id(param));
          },
          released)
      .def(
          "saved_master",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().saved_master(id(param));
          },
          released)
      .def("saved_piece",
           [](Session& self, std::uint32_t param) {
             const Piece piece = self.optimizer_state().saved_piece(id(param));
             return std::make_pair(piece.first_element, piece.numel);
           })
      .def(
          "saved_weights_of_piece",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().saved_weights_of_piece(id(param));
          },
          released)
      .def(
          "saved_states_of_piece",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().saved_states_of_piece(id(param));
          },
          released)
      .def(
          "saved_master_of_piece",
          [](Session& self, std::uint32_t param) {
            return self.optimizer_state().saved_master_of_piece(id(param));
          },
          released);
}

}  // namespace castor
