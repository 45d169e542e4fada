#include "torch/expert_cache.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "python/bindings.h"
#include "torch/gil.h"

namespace py = pybind11;

namespace castor {

void bind_expert_cache(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<ExpertCache, std::shared_ptr<ExpertCache>>(module, "ExpertCache")
      .def(py::init([](std::shared_ptr<Session> session,
                       const std::vector<std::vector<std::uint32_t>>& layers) {
             std::vector<std::vector<ParamId>> params;
             for (const auto& layer : layers) {
               params.emplace_back();
               for (const std::uint32_t param : layer) {
                 params.back().push_back(ParamId{param});
               }
             }
             return without_gil([&] {
               return std::shared_ptr<ExpertCache>(
                   new ExpertCache(std::move(session), std::move(params)),
                   [](const ExpertCache* ended) {
                     const GilRelease without;
                     delete ended;
                   });
             });
           }),
           py::arg("session"), py::arg("layers"))
      .def(
          "fetch",
          [](ExpertCache& self, std::size_t layer, const std::vector<std::int64_t>& experts)
              -> std::optional<
                  std::tuple<std::vector<at::Tensor>, std::vector<std::int64_t>, std::int64_t>> {
            auto rows = without_gil([&] { return self.fetch(layer, experts); });
            if (!rows) {
              return std::nullopt;
            }
            return std::tuple(std::move(rows->params), std::move(rows->places), rows->num_places);
          },
          py::arg("layer"), py::arg("experts"))
      .def("wait_for", &ExpertCache::await, py::arg("layer"), py::arg("param"), released)
      .def("release", &ExpertCache::release, py::arg("layer"), released)
      .def("clear", &ExpertCache::clear, released)
      .def("figures", [](const ExpertCache& self) {
        const ExpertCache::Figures figures = without_gil([&] { return self.figures(); });
        return py::dict(py::arg("expert_hits") = figures.hits,
                        py::arg("expert_misses") = figures.misses,
                        py::arg("expert_fetched_bytes") = figures.fetched_bytes,
                        py::arg("expert_cache_bytes") = figures.cache_bytes);
      });
}

}  // namespace castor
