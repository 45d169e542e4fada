#pragma once

#include <Python.h>

namespace castor {

/// Releases the tensors that forward saved for a node of autograd's, as a backward does that
/// retains no graph: the node cannot run again. Throws UsageError where `node` is no such node.
/// Requires the GIL; `node` is a borrowed reference.
void release_saved_variables(PyObject* node);

}  // namespace castor
