#include "host/host_arena.h"

#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "core/units.h"
#include "host/numa.h"

namespace castor {
namespace {

TEST(HostArenaTest, DescriptionSaysWhichArenaAndWhy) {
  const std::string text = make_host_arena()->description();
#if defined(CASTOR_HAVE_JEMALLOC)
  EXPECT_EQ(text.rfind("jemalloc arena ", 0), 0U) << text;
#else
  EXPECT_EQ(text.rfind("mmap arena", 0), 0U) << text;
  EXPECT_NE(text.find("built without jemalloc"), std::string::npos) << text;
#endif
}

TEST(HostArenaTest, ABoundArenaServesMemory) {
  if (!NumaTopology::available()) {
    EXPECT_THROW((void)make_host_arena({.numa_node = 0}), Error);
    GTEST_SKIP() << "built without hwloc";
  }
  const unsigned node = NumaTopology().nodes().front().os_index;
  const auto arena = make_host_arena({.numa_node = node});
  std::byte* const data = arena->allocate(4 * kMiB);
  data[4 * kMiB - 1] = std::byte{1};
  arena->deallocate(data, 4 * kMiB);
  EXPECT_NE(arena->description().find("bound to NUMA node " + std::to_string(node)),
            std::string::npos);
}

}  // namespace
}  // namespace castor
