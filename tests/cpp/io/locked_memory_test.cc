#include "io/locked_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <string>

namespace castor {
namespace {

TEST(LockedMemoryTest, TheRemedyNamesTheLimitItsValueAndWhatToChange) {
  const std::string text = locked_memory_remedy(65536);
  for (const char* const part :
       {"64.00 KiB", "RLIMIT_MEMLOCK", "ulimit -l unlimited", "docker run --ulimit memlock=-1"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(LockedMemoryTest, WithoutALimitTheMachineIsOutOfMemory) {
  const std::string text = locked_memory_remedy(std::nullopt);
  EXPECT_NE(text.find("out of memory"), std::string::npos) << text;
  EXPECT_EQ(text.find("ulimit"), std::string::npos) << text;
}

TEST(LockedMemoryTest, TheLimitIsThatOfTheProcess) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit lower = before;
  lower.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &lower), 0);
  EXPECT_EQ(locked_memory_limit(), 4096U);
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &before), 0);
}

}  // namespace
}  // namespace castor
