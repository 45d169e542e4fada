#include "store/lockable_bytes.h"

#include <gtest/gtest.h>

#include <memory>
#include <span>

#include "core/error.h"
#include "host/page_source.h"

namespace castor::testing {
namespace {

/// Locks no more than `limit` bytes.
class LimitedBackend final : public DeviceBackend {
 public:
  explicit LimitedBackend(std::size_t limit) : limit_(limit) {}
  [[nodiscard]] DeviceId device() const noexcept override { return {}; }
  [[nodiscard]] DeviceKernels* kernels() noexcept override { return nullptr; }
  [[nodiscard]] std::unique_ptr<CopyEngine> make_copy_engine() override { return nullptr; }
  [[nodiscard]] std::unique_ptr<Arena> make_device_arena() override { return nullptr; }
  [[nodiscard]] std::unique_ptr<Arena> make_host_arena() override { return nullptr; }
  void follow(const std::shared_ptr<DeviceAccount>& /*account*/) override {}
  [[nodiscard]] std::shared_ptr<void> lock_pages(std::span<std::byte> pages) override {
    ++calls;
    if (pages.size() > limit_) {
      throw Error("refused");
    }
    return nullptr;
  }

  int calls = 0;

 private:
  const std::size_t limit_;
};

const std::size_t kPage = system_page_sizes().page;

TEST(LockableBytesTest, WhatIsWantedIsTriedOnce) {
  LimitedBackend backend(64 * kPage);
  EXPECT_EQ(lockable_bytes(backend, 64 * kPage - 1), 64 * kPage);
  EXPECT_EQ(backend.calls, 1);
  EXPECT_EQ(lockable_bytes(backend, 0), 0U);
}

TEST(LockableBytesTest, ALimitIsFoundToASixteenth) {
  for (const std::size_t limit : {1, 2, 3, 63, 64, 65, 1000, 1023}) {
    LimitedBackend backend(limit * kPage);
    const std::size_t found = lockable_bytes(backend, 1024 * kPage);
    EXPECT_LE(found, limit * kPage);
    EXPECT_GE(found, limit * kPage - limit * kPage / 16);
  }
}

TEST(LockableBytesTest, ASystemThatLocksNothingIsFound) {
  LimitedBackend backend(kPage - 1);
  EXPECT_EQ(lockable_bytes(backend, 1024 * kPage), 0U);
}

}  // namespace
}  // namespace castor::testing
