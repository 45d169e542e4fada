#include "ranks/shared_file.h"

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
    const SharedFile shared = share_file(group, 3, kPage);
    ASSERT_TRUE(shared.file) << shared.refusal;
    EXPECT_EQ(shared.processes, std::vector<int>(3, ::getpid()));
    char byte = 1;
    ASSERT_EQ(::pread(shared.file.get(), &byte, 1, kPage - 1), 1);
    EXPECT_EQ(byte, 0);
    barrier(group);
    if (group.rank() == 2) {
      ASSERT_EQ(::pwrite(shared.file.get(), "x", 1, 5), 1);
    }
    barrier(group);
    ASSERT_EQ(::pread(shared.file.get(), &byte, 1, 5), 1);
    EXPECT_EQ(byte, 'x');
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(3));
}

TEST(SharedFileTest, RanksThatWantOtherSizesHaveNoneAndTheSameReason) {
  ThreadRanks threads(3);
  threads.run([](Collectives& group) {
    const SharedFile shared = share_file(group, 3, group.rank() == 1 ? 2 * kPage : kPage);
    EXPECT_FALSE(shared.file);
    EXPECT_EQ(shared.refusal, "rank 0's memory is not there");
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(3));
}

TEST(SharedFileTest, RanksThatCannotMapHostStorageHaveNoneAndTheSameReason) {
  ThreadRanks threads(2);
  threads.run([](Collectives& group) {
    const NodeHostStorage made =
        share_host_storage(group, 2, std::size_t{1} << 56);  // more than addresses
    EXPECT_EQ(made.storage, nullptr);
    EXPECT_EQ(made.refusal, "mapping the ranks' host storage failed: Cannot allocate memory");
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(2));
}

// Ranks of a machine are in a row, and as many on each.
TEST(SharedFileTest, NodesAreWhereEachMachineHasAsManyRanksInARow) {
  struct Layout {
    std::vector<std::string> marks;
    std::size_t size;
    std::string refusal;
  };
  const std::string apart = "ranks run on several machines";
  const std::string irregular = apart + ", and not as many on each, in a row";
  for (const Layout& layout : std::vector<Layout>{{{"a", "a", "a", "a"}, 4, ""},
                                                  {{"a", "a", "b", "b"}, 2, ""},
                                                  {{"a", "a", "b", "b", "c", "c"}, 2, ""},
                                                  {{"a", "b", "c", "d"}, 1, apart},
                                                  {{"a", "a", "b", "c"}, 1, irregular},
                                                  {{"a", "b", "a", "b"}, 1, irregular},
                                                  {{"a", "a", "b", "b", "a", "a"}, 1, irregular},
                                                  {{"a", "a", "a", "b"}, 1, irregular}}) {
    ThreadRanks threads(layout.marks.size());
    threads.run([&](Collectives& group) {
      const Nodes nodes = find_nodes(group, layout.marks[group.rank()]);
      EXPECT_EQ(nodes.size, layout.size);
      EXPECT_EQ(nodes.refusal, layout.refusal);
    });
    EXPECT_EQ(threads.failures(), std::vector<std::string>(layout.marks.size()));
  }
}

TEST(SharedFileTest, EachNodeHasAFileOfItsOwn) {
  ThreadRanks threads(4);
  threads.run([](Collectives& group) {
    const SharedFile shared = share_file(group, 2, kPage);
    ASSERT_TRUE(shared.file) << shared.refusal;
    EXPECT_EQ(shared.processes.size(), 2);
    if (group.rank() % 2 == 0) {
      ASSERT_EQ(::pwrite(shared.file.get(), group.rank() == 0 ? "x" : "y", 1, 5), 1);
    }
    barrier(group);
    char byte = 0;
    ASSERT_EQ(::pread(shared.file.get(), &byte, 1, 5), 1);
    EXPECT_EQ(byte, group.rank() < 2 ? 'x' : 'y');
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(4));
}

}  // namespace
}  // namespace castor
