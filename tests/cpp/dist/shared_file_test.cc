#include "dist/shared_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/thread_collectives.h"

namespace castor {
namespace {

constexpr std::size_t kPage = 4096;

TEST(SharedFileTest, RanksHaveOneFileOfZeros) {
  ThreadRanks threads(3);
  threads.run([](Collectives& group) {
    const SharedFile shared = share_file(group, kPage);
    ASSERT_TRUE(shared.file) << shared.refusal;
    EXPECT_EQ(shared.processes, std::vector<int>(3, ::getpid()));
    char byte = 1;
    ASSERT_EQ(::pread(shared.file.get(), &byte, 1, kPage - 1), 1);
    EXPECT_EQ(byte, 0);
    meet(group);
    if (group.rank() == 2) {
      ASSERT_EQ(::pwrite(shared.file.get(), "x", 1, 5), 1);
    }
    meet(group);
    ASSERT_EQ(::pread(shared.file.get(), &byte, 1, 5), 1);
    EXPECT_EQ(byte, 'x');
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(3));
}

TEST(SharedFileTest, RanksThatWantOtherSizesHaveNoneAndTheSameReason) {
  ThreadRanks threads(3);
  threads.run([](Collectives& group) {
    const SharedFile shared = share_file(group, group.rank() == 1 ? 2 * kPage : kPage);
    EXPECT_FALSE(shared.file);
    EXPECT_EQ(shared.refusal, "rank 0's memory is not there");
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(3));
}

TEST(SharedFileTest, RanksThatCannotMapHomesHaveNoneAndTheSameReason) {
  ThreadRanks threads(2);
  threads.run([](Collectives& group) {
    const HomesOfRanks made = share_homes(group, std::size_t{1} << 56);  // more than addresses
    EXPECT_EQ(made.homes, nullptr);
    EXPECT_EQ(made.refusal, "mapping the ranks' homes failed: Cannot allocate memory");
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(2));
}

}  // namespace
}  // namespace castor
