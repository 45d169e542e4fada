#include "host/piecewise_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "core/executor.h"

namespace castor {
namespace {

class TwoThreads final : public Executor {
 public:
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) override {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < count; ++i) {
      threads.emplace_back(body, i);
    }
  }
  [[nodiscard]] std::size_t num_threads() const noexcept override { return 2; }
};

std::vector<std::byte> values(std::size_t bytes) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    values[i] = static_cast<std::byte>(1 + i % 251);
  }
  return values;
}

TEST(CopyPastCachesTest, EveryByteIsCopiedAndNoOther) {
  const std::vector<std::byte> source = values(1000);
  for (const std::size_t begin : {0, 1, 13, 64}) {
    for (const std::size_t bytes : {0, 1, 15, 63, 64, 65, 128, 900}) {
      alignas(64) std::array<std::byte, 1024> target{};
      copy_past_caches(std::span(source).subspan(begin, bytes), target.data());
      EXPECT_TRUE(std::equal(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(bytes),
                             source.begin() + static_cast<std::ptrdiff_t>(begin)));
      EXPECT_TRUE(std::all_of(target.begin() + static_cast<std::ptrdiff_t>(bytes), target.end(),
                              [](std::byte value) { return value == std::byte{0}; }));
    }
  }
}

/// Two runs, and room for them, of which the second begins behind the first's last piece.
struct Runs {
  static constexpr std::size_t kFirst = 3 * PiecewiseCopy::kPieceBytes + 100;
  static constexpr std::size_t kSecond = 7000;
  static constexpr std::size_t kAligned = 3 * PiecewiseCopy::kPieceBytes + 128;

  Runs() {
    copy.add(std::span(first), target.get());
    copy.add(std::span(second), target.get() + kAligned);
  }
  [[nodiscard]] bool copied() const {
    return std::memcmp(first.data(), target.get(), kFirst) == 0 &&
           std::memcmp(second.data(), target.get() + kAligned, kSecond) == 0;
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const std::vector<std::byte> first = values(kFirst);
  const std::vector<std::byte> second = values(kSecond);
  const std::unique_ptr<std::byte, Free> target{
      static_cast<std::byte*>(std::aligned_alloc(64, 4 * PiecewiseCopy::kPieceBytes))};
  PiecewiseCopy copy;
};

TEST(PiecewiseCopyTest, NothingIsCopiedAtOnce) {
  PiecewiseCopy copy;
  copy.finish(nullptr);
  copy.finish(nullptr);
}

TEST(PiecewiseCopyTest, OneThreadOrSeveralCopyAll) {
  TwoThreads two;
  for (Executor* const executor : {static_cast<Executor*>(nullptr), static_cast<Executor*>(&two)}) {
    Runs runs;
    runs.copy.finish(executor);
    EXPECT_TRUE(runs.copied());
    runs.copy.finish(executor);  // which there is nothing to do for
  }
}

// Each sees all of it, whoever copied which piece, and changes the source then.
TEST(PiecewiseCopyTest, WhoComesBesideTakesOver) {
  TwoThreads two;
  for (int round = 0; round < 20; ++round) {
    Runs runs;
    std::vector<std::jthread> threads;
    for (Executor* const executor :
         {static_cast<Executor*>(nullptr), static_cast<Executor*>(&two)}) {
      threads.emplace_back([&, executor] {
        runs.copy.finish(executor);
        EXPECT_TRUE(runs.copied());
      });
    }
  }
}

}  // namespace
}  // namespace castor
