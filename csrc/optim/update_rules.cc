#include <string>

#include "core/error.h"
#include "optim/adam_rule.h"
#include "optim/update_rule.h"

namespace castor {
namespace {

template <typename Rule>
std::unique_ptr<UpdateRule> make(StateFormat format) {
  return std::make_unique<Rule>(format);
}

struct Registered {
  std::string_view name;
  std::unique_ptr<UpdateRule> (*make)(StateFormat);
};

constexpr Registered kRules[] = {{AdamRule::kName, &make<AdamRule>}};

}  // namespace

std::unique_ptr<UpdateRule> make_update_rule(std::string_view name, StateFormat format) {
  std::string known;
  for (const Registered& rule : kRules) {
    if (rule.name == name)
      return rule.make(format);
    known += (known.empty() ? "" : ", ") + std::string(rule.name);
  }
  throw InvalidArgument("there is no update rule '" + std::string(name) + "'; there are " + known);
}

}  // namespace castor
