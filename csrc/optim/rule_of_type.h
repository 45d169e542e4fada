#pragma once

#include "core/scalar_type.h"
#include "optim/update_rule.h"

namespace castor {

/// Returns the rule that updates parameters of `type` where others have `rule`. That is `rule`
/// itself, except for fp32 parameters of a split format: they are their own masters and are not
/// split, so they get the same rule in kFp32. The result lives as long as `rule`, or as the
/// process.
[[nodiscard]] const UpdateRule& rule_of_type(const UpdateRule& rule, ScalarType type);

}  // namespace castor
