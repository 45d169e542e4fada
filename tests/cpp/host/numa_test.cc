#include "host/numa.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/units.h"
#include "host/host_arena.h"

namespace castor {
namespace {

class NumaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!NumaTopology::available()) {
      GTEST_SKIP() << "built without hwloc";
    }
  }
};

TEST_F(NumaTest, ThisMachineHasNodesWithMemory) {
  const NumaTopology topology;
  ASSERT_GE(topology.nodes().size(), 1U);
  EXPECT_GT(topology.nodes().front().memory_bytes, 0U);
}

TEST_F(NumaTest, SyntheticNodesAreReadInOrder) {
  const NumaTopology topology("node:3 core:2 pu:2");
  ASSERT_EQ(topology.nodes().size(), 3U);
  for (unsigned i = 0; i < 3; ++i) {
    EXPECT_EQ(topology.nodes()[i].os_index, i);
    EXPECT_EQ(topology.nodes()[i].num_pus, 4U);
  }
}

TEST_F(NumaTest, CachesOfTheLastLevelCountTogether) {
  EXPECT_EQ(
      NumaTopology("package:2 l3:1(size=8388608) l2:2(size=1048576) core:1 pu:1").cache_bytes(),
      16 * kMiB);
  EXPECT_EQ(NumaTopology("package:2 l2:2(size=1048576) core:1 pu:1").cache_bytes(), 4 * kMiB);
  EXPECT_EQ(NumaTopology("core:2 pu:1").cache_bytes(), 0U);
}

TEST_F(NumaTest, NonsenseTopologiesAreRefused) {
  EXPECT_THROW(NumaTopology("three cabbages"), InvalidArgument);
}

TEST_F(NumaTest, BindingToANodeOfThisMachineWorks) {
  const NumaTopology topology;
  const unsigned node = topology.nodes().front().os_index;
  OsPages pages;
  std::byte* const data = pages.map(kMiB, 4096);
  ASSERT_NE(data, nullptr);
  if (!topology.bind({data, kMiB}, node)) {
    const int reason = errno;
    EXPECT_TRUE(pages.unmap(data, kMiB));
    GTEST_SKIP() << "this system refuses to bind memory: " << std::strerror(reason);
  }
  std::memset(data, 1, kMiB);
  EXPECT_TRUE(pages.unmap(data, kMiB));
}

TEST_F(NumaTest, BindingToAMissingNodeIsRefused) {
  const NumaTopology topology;
  std::byte byte{};
  EXPECT_FALSE(topology.bind({&byte, 1}, 9999));
  EXPECT_THROW(BoundPages(std::make_unique<OsPages>(), NumaTopology(), 9999), InvalidArgument);
  EXPECT_THROW((void)make_host_arena({.numa_node = 9999}), InvalidArgument);
}

TEST_F(NumaTest, ARefusedBindingStillMapsAndShowsInTheDescription) {
  BoundPages pages(std::make_unique<OsPages>(), NumaTopology("node:2 pu:1"), 1);
  std::byte* const data = pages.map(kMiB, 4096);
  ASSERT_NE(data, nullptr);
  data[0] = std::byte{1};
  EXPECT_NE(pages.description().find("bound to NUMA node 1 (refused for 1 mapping(s))"),
            std::string::npos)
      << pages.description();
  EXPECT_TRUE(pages.unmap(data, kMiB));
}

}  // namespace
}  // namespace castor
