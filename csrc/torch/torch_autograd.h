#pragma once

#include <memory>

#include "store/passes.h"

namespace castor {

[[nodiscard]] std::unique_ptr<Autograd> torch_autograd();

}  // namespace castor
