#include "host/reused_pages.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/units.h"
#include "host/forks.h"

namespace castor {
namespace {

TEST(ReusedPagesTest, MemoryIsUsedAgain) {
  for (const std::size_t bytes : {std::size_t{1}, 100 * kKiB, 5 * kMiB + 1}) {
    const auto pages = ReusedPages::map(std::make_shared<OsPages>(), bytes);
    ASSERT_NE(pages, nullptr);
    EXPECT_GE(pages->bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pages->data()) % system_page_sizes().page, 0U);
    for (int use = 1; use <= 3; ++use) {
      std::memset(pages->data(), use, bytes);
      EXPECT_EQ(pages->data()[bytes - 1], std::byte(use));
      pages->let_go();
    }
  }
}

TEST(ReusedPagesTest, WhatIsTooMuchIsRefused) {
  EXPECT_EQ(ReusedPages::map(std::make_shared<OsPages>(), std::size_t{1} << 60), nullptr);
}

TEST(ReusedPagesTest, ForkedChildrenDoNotGetThem) {
  if (!testing::kMappingsTell) {
    GTEST_SKIP() << "a sanitizer maps memory of its own";
  }
  const std::size_t page = system_page_sizes().page;
  const auto pages = ReusedPages::map(std::make_shared<OsPages>(), page);
  pages->data()[0] = std::byte{1};
  EXPECT_TRUE(testing::is_mapped(pages->data(), page));
  EXPECT_EQ(testing::in_forked_child([&] { return testing::is_mapped(pages->data(), page); }), 0);
}

}  // namespace
}  // namespace castor
