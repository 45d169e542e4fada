#include "torch/torch_expert_cache.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "python/bindings.h"
#include "torch/expert_rows.h"
#include "torch/gil.h"

namespace py = pybind11;

namespace castor {

namespace {

std::vector<ParamId> param_ids(const std::vector<std::uint32_t>& numbers) {
  std::vector<ParamId> params;
  for (const std::uint32_t number : numbers) {
    params.push_back(ParamId{number});
  }
  return params;
}

}  // namespace

void bind_expert_cache(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<TorchExpertCache, std::shared_ptr<TorchExpertCache>>(module, "ExpertCache")
      .def(py::init([](std::shared_ptr<Session> session,
                       const std::vector<std::vector<std::uint32_t>>& layers) {
             std::vector<std::vector<ParamId>> params;
             for (const auto& layer : layers) {
               params.push_back(param_ids(layer));
             }
             return without_gil([&] {
               return std::shared_ptr<TorchExpertCache>(
                   new TorchExpertCache(std::move(session), std::move(params)),
                   [](const TorchExpertCache* ended) {
                     const GilRelease without;
                     delete ended;
                   });
             });
           }),
           py::arg("session"), py::arg("layers"))
      .def(
          "fetch",
          [](TorchExpertCache& self, std::size_t layer, const std::vector<std::int64_t>& experts)
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
          "wait_for",
          [](TorchExpertCache& self, std::size_t layer, std::size_t param) {
            self.cache().await(layer, param);
          },
          py::arg("layer"), py::arg("param"), released)
      .def(
          "release", [](TorchExpertCache& self, std::size_t layer) { self.cache().release(layer); },
          py::arg("layer"), released)
      .def(
          "clear", [](TorchExpertCache& self) { self.cache().clear(); }, released)
      .def("figures", [](const TorchExpertCache& self) {
        const ExpertCache::Figures figures = without_gil([&] { return self.cache().figures(); });
        return py::dict(py::arg("expert_hits") = figures.hits,
                        py::arg("expert_misses") = figures.misses,
                        py::arg("expert_fetched_bytes") = figures.fetched_bytes,
                        py::arg("expert_cache_bytes") = figures.cache_bytes);
      });
  const auto fetching = [](auto fetch) {
    return [fetch](std::shared_ptr<Session> session, const std::vector<std::uint32_t>& params,
                   const std::vector<std::int64_t>& experts) {
      return without_gil([&] { return fetch(std::move(session), param_ids(params), experts); });
    };
  };
  py::class_<ExpertRows, std::shared_ptr<ExpertRows>>(module, "ExpertRows")
      .def_static("fetch", fetching(&ExpertRows::fetch), py::arg("session"), py::arg("params"),
                  py::arg("experts"))
      .def_static("fetch_ahead", fetching(&ExpertRows::fetch_ahead), py::arg("session"),
                  py::arg("params"), py::arg("experts"))
      .def("take", &ExpertRows::take, py::arg("position"), released)
      .def_property_readonly("bytes", &ExpertRows::bytes);
}

}  // namespace castor
