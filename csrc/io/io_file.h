#pragma once

#include <string>

namespace castor {

/// A file that an engine reads and writes. The descriptor is borrowed and outlives the engine.
struct IoFile {
  int descriptor = -1;
  std::string path;  ///< for messages
};

}  // namespace castor
