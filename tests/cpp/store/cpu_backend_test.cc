#include "store/cpu_backend.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "parallel/immediate_copy_engine.h"

namespace castor::testing {
namespace {

void* forgiven = nullptr;

struct Torch {
  int counting = 0;
  int engines = 0;

  [[nodiscard]] std::shared_ptr<DeviceBackend> backend(std::uint64_t link) {
    return make_cpu_backend(link, {.device = {.type = 0, .number = -1},
                                   .make_copy_engine =
                                       [this] {
                                         ++engines;
                                         return std::make_unique<ImmediateCopyEngine>();
                                       },
                                   .count_allocations = [this] { ++counting; },
                                   .stop_counting = [](void* data) noexcept { forgiven = data; }});
  }
};

TEST(CpuBackendTest, WithoutALinkTorchsEngineCopiesBehindOneAThreadDoes) {
  Torch torch;
  EXPECT_FALSE(torch.backend(0)->make_copy_engine()->asynchronous());
  EXPECT_EQ(torch.engines, 1);
  EXPECT_TRUE(torch.backend(1'000'000)->make_copy_engine()->asynchronous());
  EXPECT_EQ(torch.engines, 1);
}

TEST(CpuBackendTest, TheHostWorksInItsMemoryAndTorchCountsIt) {
  Torch torch;
  const auto backend = torch.backend(0);
  EXPECT_FALSE(backend->computes_by_itself());
  EXPECT_EQ(backend->device().type, 0);
  backend->follow(nullptr);
  EXPECT_EQ(torch.counting, 1);
  int allocation = 0;
  EXPECT_TRUE(backend->stop_counting(&allocation));
  EXPECT_EQ(forgiven, &allocation);
}

}  // namespace
}  // namespace castor::testing
