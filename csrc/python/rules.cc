#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "optim/update_rule.h"
#include "python/bindings.h"
#include "python/names.h"

namespace py = pybind11;

namespace castor {

std::vector<RuleOptions> rule_options(const UpdateRule& rule, const std::vector<py::dict>& groups) {
  std::vector<RuleOptions> options;
  for (const py::dict& group : groups) {
    RuleOptions& values = options.emplace_back();
    std::size_t i = 0;
    for (const std::string_view name : rule.option_names()) {
      values.at(i++) = group[py::str(std::string(name))].cast<double>();
    }
  }
  return options;
}

void bind_rules(py::module_& module) {
  module.def(
      "rule_state_names",
      [](const std::string& rule, StateFormat format) {
        std::vector<std::string> names;
        for (const StateSpec& spec : make_update_rule(rule, format)->states()) {
          names.emplace_back(spec.name);
        }
        return names;
      },
      py::arg("rule"), py::arg("state_format"));
  module.def(
      "rule_formats",
      [](const std::string& rule) {
        const auto formats = formats_of_rule(rule);
        return std::vector<StateFormat>(formats.begin(), formats.end());
      },
      py::arg("rule"));
  module.def(
      "check_rule_options",
      [](const std::string& name, const std::vector<py::dict>& groups) {
        const auto rule = make_update_rule(name, formats_of_rule(name).front());
        check_options(*rule, rule_options(*rule, groups));
      },
      py::arg("rule"), py::arg("groups"));
}

}  // namespace castor
