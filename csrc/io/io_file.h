#pragma once

#include <string>

namespace castor {

/// A file that an engine reads and writes: the descriptor is borrowed and outlives the engine.
struct IoFile {
  int descriptor = -1;
  std::string path;  ///< for messages
};

}  // namespace castor
