#pragma once

#include "core/scalar_type.h"
#include "optim/update_rule.h"

namespace castor {

/// The rule that updates parameters of `type` where others have `rule`: that one; but fp32
/// parameters, which are their own masters, are not split, and get the same rule in kFp32. It
/// lives as long as `rule`, or as the process.
[[nodiscard]] const UpdateRule& rule_of_type(const UpdateRule& rule, ScalarType type);

}  // namespace castor
