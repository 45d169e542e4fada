#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <string>

#include "core/error.h"

namespace castor::testing {

/// Returns the exception of exactly this type that `call` throws; nullopt, and a failure of the
/// test, where it throws none or another.
template <typename Exception, typename Call>
[[nodiscard]] std::optional<Exception> thrown(const Call& call) {
  try {
    call();
  } catch (const Exception& error) {
    EXPECT_EQ(typeid(error), typeid(Exception)) << error.what();
    return error;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw another exception: " << error.what();
    return std::nullopt;
  }
  ADD_FAILURE() << "threw nothing";
  return std::nullopt;
}

/// Expects that `call` throws an Exception whose message has `part` in it.
template <typename Exception, typename Call>
void expect_thrown(const Call& call, const std::string& part) {
  if (const auto error = thrown<Exception>(call)) {
    EXPECT_NE(std::string(error->what()).find(part), std::string::npos) << error->what();
  }
}

/// Expects that `call` throws OutOfMemory with these figures.
template <typename Call>
void expect_out_of_memory(const Call& call, TierKind tier, std::size_t requested,
                          std::size_t available, std::size_t budget) {
  if (const auto error = thrown<OutOfMemory>(call)) {
    EXPECT_EQ(error->tier(), tier);
    EXPECT_EQ(error->requested(), requested);
    EXPECT_EQ(error->available(), available);
    EXPECT_EQ(error->budget(), budget);
  }
}

}  // namespace castor::testing
