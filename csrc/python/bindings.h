#pragma once

#include <pybind11/pybind11.h>

namespace castor {

/// castor._C.AdamArrays: the fused Adam over ordinary CPU tensors, for HybridAdam used alone.
void bind_adam(pybind11::module_& module);

}  // namespace castor
