#pragma once

#include <Python.h>

namespace castor {

/// Lets go of what forward saved for a node of autograd's, as a backward does that retains no
/// graph: the node cannot run again. Throws UsageError where `node` is none. Requires the GIL; a
/// borrowed reference.
void release_saved_variables(PyObject* node);

}  // namespace castor
