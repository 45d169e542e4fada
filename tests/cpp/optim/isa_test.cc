#include "optim/isa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "optim/adam.h"

namespace castor {
namespace {

TEST(IsaTest, BaselineIsAlwaysSupportedAndComesFirst) {
  ASSERT_FALSE(supported_isas().empty());
  EXPECT_EQ(supported_isas().front(), Isa::kBaseline);
  EXPECT_TRUE(std::ranges::is_sorted(supported_isas()));
}

TEST(IsaTest, AdamUsesTheBestSupportedIsa) {
  EXPECT_EQ(best_isa(), supported_isas().back());
  EXPECT_EQ(adam_isa(), to_string(best_isa()));
}

// The other suites run every supported ISA: this says that none of the processor's was forgotten.
TEST(IsaTest, AgreesWithTheKernelsListOfProcessorFlags) {
#if !defined(__x86_64__)
  EXPECT_EQ(supported_isas().size(), 1u);
#else
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line) && line.rfind("flags", 0) != 0) {
  }
  if (line.rfind("flags", 0) != 0)
    GTEST_SKIP() << "/proc/cpuinfo has no flags line";
  std::istringstream words(line);
  bool avx2 = false;
  int avx512 = 0;
  for (std::string word; words >> word;) {
    avx2 = avx2 || word == "avx2";
    avx512 += word == "avx512f" || word == "avx512bw" || word == "avx512dq" || word == "avx512vl";
  }
  EXPECT_EQ(std::ranges::count(supported_isas(), Isa::kAvx2), avx2 ? 1 : 0);
  EXPECT_EQ(std::ranges::count(supported_isas(), Isa::kAvx512), avx512 == 4 ? 1 : 0);
#endif
}

}  // namespace
}  // namespace castor
