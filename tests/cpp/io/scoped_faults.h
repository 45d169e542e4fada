#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "io/fault_injection.h"

namespace castor::testing {

/// Faults of the engines that are made by way of replace() while it lives, each of which counts
/// its operations anew.
class ScopedFaults {
 public:
  /// `text`: see parse_io_faults; empty: the engines stay as they are.
  explicit ScopedFaults(std::string text) { current() = std::move(text); }
  ~ScopedFaults() { current().clear(); }
  ScopedFaults(const ScopedFaults&) = delete;
  ScopedFaults& operator=(const ScopedFaults&) = delete;

  /// For NvmeOptions::replace_engine.
  [[nodiscard]] static std::unique_ptr<IoEngine> replace(std::unique_ptr<IoEngine> engine) {
    return current().empty()
               ? std::move(engine)
               : std::make_unique<FaultyIoEngine>(std::move(engine), parse_io_faults(current()));
  }

 private:
  static std::string& current() {
    static std::string text;
    return text;
  }
};

}  // namespace castor::testing
