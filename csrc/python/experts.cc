#include "torch/torch_experts.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "python/bindings.h"
#include "torch/gil.h"

namespace py = pybind11;

namespace castor {

void bind_experts(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<TorchExperts, std::shared_ptr<TorchExperts>>(module, "Experts")
      .def(py::init([](std::shared_ptr<Session> session,
                       const std::vector<std::vector<std::uint32_t>>& layers) {
             std::vector<std::vector<ParamId>> params;
             for (const auto& layer : layers) {
               std::vector<ParamId>& of_layer = params.emplace_back();
               for (const std::uint32_t number : layer) {
                 of_layer.push_back(ParamId{number});
               }
             }
             return without_gil([&] {
               return std::shared_ptr<TorchExperts>(new TorchExperts(std::move(session), params),
                                                    [](const TorchExperts* ended) {
                                                      const GilRelease without;
                                                      delete ended;
                                                    });
             });
           }),
           py::arg("session"), py::arg("layers"))
      .def(
          "fetch",
          [](TorchExperts& self, std::size_t layer, const std::vector<std::int64_t>& experts)
              -> std::optional<
                  std::tuple<std::vector<at::Tensor>, std::vector<std::int64_t>, std::int64_t>> {
            auto rows = without_gil([&] { return self.fetch(layer, experts); });
            if (!rows) {
              return std::nullopt;
            }
            return std::tuple(std::move(rows->params), std::move(rows->places), rows->num_places);
          },
          py::arg("layer"), py::arg("experts"))
      .def(
          "guess",
          [](TorchExperts& self, std::size_t layer, const std::vector<std::int64_t>& likely) {
            self.cache().guess(layer, likely);
          },
          py::arg("layer"), py::arg("likely"), released)
      .def(
          "takes_guesses",
          [](TorchExperts& self, std::size_t layer) { return self.cache().takes_guesses(layer); },
          py::arg("layer"), released)
      .def(
          "wait_for",
          [](TorchExperts& self, std::size_t layer, std::size_t param) {
            self.cache().await(layer, param);
          },
          py::arg("layer"), py::arg("param"), released)
      .def(
          "release", [](TorchExperts& self, std::size_t layer) { self.cache().release(layer); },
          py::arg("layer"), released)
      .def(
          "rows",
          [](TorchExperts& self, std::size_t layer, const std::vector<std::int64_t>& experts) {
            return self.rows(layer, experts);
          },
          py::arg("layer"), py::arg("experts"), released)
      .def(
          "rows_ahead",
          [](TorchExperts& self, std::size_t layer, const std::vector<std::int64_t>& experts) {
            return self.rows_ahead(layer, experts);
          },
          py::arg("layer"), py::arg("experts"), released)
      .def(
          "gradient_rows",
          [](TorchExperts& self, std::size_t layer, std::size_t position, const at::Tensor& experts,
             const at::Tensor& gradients) {
            self.gradient_rows(layer, position, experts, gradients);
          },
          py::arg("layer"), py::arg("position"), py::arg("experts"), py::arg("gradients"), released)
      .def(
          "expect_rows", [](TorchExperts& self) { self.expect_rows(); }, released)
      .def(
          "clear", [](TorchExperts& self) { self.cache().clear(); }, released)
      .def("figures", [](const TorchExperts& self) {
        const ExpertCache::Figures figures = without_gil([&] { return self.cache().figures(); });
        return py::dict(py::arg("expert_hits") = figures.hits,
                        py::arg("expert_misses") = figures.misses,
                        py::arg("expert_fetched_bytes") = figures.fetched_bytes,
                        py::arg("expert_cache_bytes") = figures.cache_bytes,
                        py::arg("expert_guessed_bytes") = figures.guessed_bytes,
                        py::arg("expert_right_guesses") = figures.right_guesses);
      });
  py::class_<TorchExperts::Rows, std::shared_ptr<TorchExperts::Rows>>(module, "ExpertRows")
      .def("take", &TorchExperts::Rows::take, py::arg("position"), released)
      .def_property_readonly("bytes", &TorchExperts::Rows::bytes);
}

}  // namespace castor
