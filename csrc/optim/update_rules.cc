#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "optim/adam_rule.h"
#include "optim/lion_rule.h"
#include "optim/rule_of_type.h"
#include "optim/sgd_rule.h"
#include "optim/update_rule.h"

namespace castor {
namespace {

template <typename Rule>
std::unique_ptr<UpdateRule> make(StateFormat format) {
  return std::make_unique<Rule>(format);
}

struct Registered {
  std::string_view name;
  std::span<const StateFormat> formats;
  std::unique_ptr<UpdateRule> (*make)(StateFormat);
};

template <typename Rule>
constexpr Registered registered() {
  return {Rule::kName, Rule::kFormats, &make<Rule>};
}

constexpr Registered kRules[] = {registered<AdamRule>(), registered<LionRule>(),
                                 registered<SgdRule<Momentum::kNone>>(),
                                 registered<SgdRule<Momentum::kBuffer>>()};

const Registered& find(std::string_view name) {
  std::string known;
  for (const Registered& rule : kRules) {
    if (rule.name == name)
      return rule;
    known += (known.empty() ? "" : ", ") + std::string(rule.name);
  }
  throw InvalidArgument("there is no update rule '" + std::string(name) + "'; there are " + known);
}

}  // namespace

std::unique_ptr<UpdateRule> make_update_rule(std::string_view name, StateFormat format) {
  const Registered& rule = find(name);
  std::string known;
  for (const StateFormat one : rule.formats) {
    if (one == format)
      return rule.make(format);
    known += (known.empty() ? "" : ", ") + std::string(to_string(one));
  }
  throw InvalidArgument("the update rule '" + std::string(name) + "' has no state format " +
                        std::string(to_string(format)) + "; there are " + known);
}

const UpdateRule& rule_of_type(const UpdateRule& rule, ScalarType type) {
  if (type != ScalarType::kFloat32 || !rule.splits_masters())
    return rule;
  // One immutable instance for each registered rule.
  static const auto unsplit = [] {
    std::vector<std::unique_ptr<const UpdateRule>> rules;
    for (const Registered& registered : kRules)
      rules.push_back(registered.make(StateFormat::kFp32));
    return rules;
  }();
  return *unsplit[static_cast<std::size_t>(&find(rule.name()) - kRules)];
}

std::span<const StateFormat> formats_of_rule(std::string_view name) { return find(name).formats; }

void check_options(const UpdateRule& rule, std::span<const RuleOptions> groups) {
  for (std::size_t i = 0; i < groups.size(); ++i) {
    try {
      static_cast<void>(rule.coefficients(groups[i], 1, 1.0));
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("param_groups[" + std::to_string(i) + "]: " + error.what());
    }
  }
}

}  // namespace castor
