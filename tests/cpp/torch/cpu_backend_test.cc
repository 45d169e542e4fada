#include "torch/cpu_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "core/random_bytes.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;

TEST(CpuCopyEngineTest, CopiesExactlyTheBytesAskedForFromAndToAnyAddress) {
  // Torch splits a copy among its threads from 32,768 elements on.
  const auto engine = make_cpu_copy_engine();
  for (const std::size_t bytes : {0U, 1U, 63U, 4096U, 32'767U, 32'769U, 1'000'003U}) {
    for (const std::size_t skew : {0U, 1U, 7U}) {
      const Bytes source = random_bytes(bytes + skew, 1);
      Bytes target(bytes + 2 + skew, std::byte{0xee});  // a guard on either side
      const CopyTicket ticket =
          engine->submit({.source = std::span(source).subspan(skew),
                          .target = std::span(target).subspan(1 + skew, bytes)});
      EXPECT_TRUE(engine->done(ticket));
      EXPECT_TRUE(std::equal(source.begin() + skew, source.end(), target.begin() + 1 + skew))
          << bytes << " bytes, " << skew << " further";
      EXPECT_EQ(target[skew], std::byte{0xee});
      EXPECT_EQ(target.back(), std::byte{0xee});
    }
  }
}

}  // namespace
}  // namespace castor::testing
