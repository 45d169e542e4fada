// Rows of four bytes: byte i of the host's memory is i.

#include "store/row_copies.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "parallel/async_copy_engine.h"
#include "store/fake_device.h"

namespace castor::testing {
namespace {

constexpr std::size_t kRowBytes = 4;

class RowCopiesTest : public ::testing::Test {
 protected:
  RowCopiesTest() : host_(10 * kRowBytes), device_memory_(10 * kRowBytes) {
    for (std::size_t i = 0; i < host_.size(); ++i) {
      host_[i] = static_cast<std::byte>(i);
    }
  }
  [[nodiscard]] RowCopies::Param param() {
    return {.host = host_.data(), .device = device_memory_.data(), .row_bytes = kRowBytes};
  }
  void expect_row(std::int64_t from, std::int64_t to) const {
    EXPECT_EQ(
        std::memcmp(host_.data() + static_cast<std::size_t>(from) * kRowBytes,
                    device_memory_.data() + static_cast<std::size_t>(to) * kRowBytes, kRowBytes),
        0)
        << "row " << from << " in place " << to;
  }

  std::mutex link_;  // a copy holds it
  bool fails_ = false;
  std::vector<std::size_t> sizes_;
  std::vector<std::byte> host_;
  std::vector<std::byte> device_memory_;
  AsyncCopyEngine engine_{{.copy = [this](const CopyRequest& request) {
    const std::lock_guard lock(link_);
    sizes_.push_back(request.source.size());
    if (fails_) {
      throw Error("the link is down");
    }
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }}};
  const SessionDevice device_{std::make_shared<FakeDevice>()};
};

TEST_F(RowCopiesTest, RowsThatFollowEachOtherOnBothSidesAreOneCopy) {
  RowCopies copies(engine_, device_, 1);
  const std::vector<RowCopies::Row> rows{{2, 0}, {3, 1}, {4, 2}, {5, 9}, {6, 4}, {8, 5}};
  EXPECT_EQ(copies.begin(0, param(), rows), 6 * kRowBytes);
  copies.await(0);
  EXPECT_EQ(sizes_, (std::vector<std::size_t>{3 * kRowBytes, kRowBytes, kRowBytes, kRowBytes}));
  for (const RowCopies::Row row : rows) {
    expect_row(row.from, row.to);
  }
}

TEST_F(RowCopiesTest, NoRowsAreNoCopy) {
  RowCopies copies(engine_, device_, 1);
  EXPECT_EQ(copies.begin(0, param(), {}), 0U);
  copies.await(0);
  EXPECT_TRUE(sizes_.empty());
}

TEST_F(RowCopiesTest, AParameterIsAwaitedWithoutThoseBehindIt) {
  RowCopies copies(engine_, device_, 2);
  copies.begin(0, param(), std::vector<RowCopies::Row>{{1, 0}});
  copies.await(0);
  {
    const std::lock_guard down(link_);
    copies.begin(1, param(), std::vector<RowCopies::Row>{{2, 1}});
    copies.await(0);
    expect_row(1, 0);
  }
  copies.await(1);
  expect_row(2, 1);
}

TEST_F(RowCopiesTest, AFailureIsToldOnceWhenAllCopiesOfTheParameterAreOver) {
  RowCopies copies(engine_, device_, 1);
  fails_ = true;
  copies.begin(0, param(), std::vector<RowCopies::Row>{{1, 5}, {3, 1}});
  EXPECT_THROW(copies.await(0), Error);
  EXPECT_EQ(sizes_.size(), 2U);
  copies.await(0);
}

TEST_F(RowCopiesTest, TheEndWaitsForCopiesThatNobodyAwaitedAlsoWhereTheyFail) {
  {
    RowCopies copies(engine_, device_, 2);
    copies.begin(0, param(), std::vector<RowCopies::Row>{{1, 0}});
    RowCopies moved = std::move(copies);
    moved.begin(1, param(), std::vector<RowCopies::Row>{{4, 3}});
  }
  EXPECT_EQ(sizes_.size(), 2U);
  expect_row(1, 0);
  expect_row(4, 3);
  fails_ = true;
  {
    RowCopies copies(engine_, device_, 1);
    copies.begin(0, param(), std::vector<RowCopies::Row>{{1, 0}});
  }
  EXPECT_EQ(sizes_.size(), 3U);
}

}  // namespace
}  // namespace castor::testing
