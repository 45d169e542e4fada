#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "io/fault_injection.h"

namespace castor::testing {

/// Sets CASTOR_IO_FAULTS for the engines that are made while it lives.
class ScopedFaults {
 public:
  explicit ScopedFaults(const std::string& text) {
    EXPECT_EQ(::setenv(kIoFaultsVariable, text.c_str(), 1), 0);
  }
  ~ScopedFaults() { ::unsetenv(kIoFaultsVariable); }
  ScopedFaults(const ScopedFaults&) = delete;
  ScopedFaults& operator=(const ScopedFaults&) = delete;
};

}  // namespace castor::testing
