#include "core/scalar_type.h"

#include <string>

#include "core/error.h"

namespace castor {

void throw_no_arithmetic(ScalarType type) {
  throw InvalidArgument("there is no arithmetic of " + std::string(to_string(type)) +
                        " elements: they are packed, and frozen");
}

}  // namespace castor
