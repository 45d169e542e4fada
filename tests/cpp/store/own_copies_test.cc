#include "core/own_copies.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "host/slot_arena.h"

namespace castor::testing {
namespace {

constexpr std::size_t kBytes = 4096;

/// Counts what it hands out.
class CountingArena final : public HeapArena {
 public:
  explicit CountingArena(std::shared_ptr<LiveBlocks> live, int* calls)
      : HeapArena(std::move(live)), calls_(calls) {}
  std::byte* allocate(std::size_t bytes) override {
    ++*calls_;
    return HeapArena::allocate(bytes);
  }

 private:
  int* const calls_;
};

struct Made {
  explicit Made(std::size_t budget, std::size_t kept)
      : host(std::make_shared<MemoryTier>(
            TierKind::kHost, budget, std::make_unique<HeapArena>(std::make_shared<LiveBlocks>()))),
        copies(host,
               std::make_unique<SlotArena>(std::make_unique<CountingArena>(live, &calls),
                                           TierKind::kHost),
               kept) {}

  int calls = 0;
  std::shared_ptr<LiveBlocks> live = std::make_shared<LiveBlocks>();
  std::shared_ptr<MemoryTier> host;
  OwnCopies copies;
};

TEST(OwnCopiesTest, ACopyTakesTheMemoryOfTheLastOne) {
  Made made(1 << 20, 2 * kBytes);
  for (int pass = 0; pass < 5; ++pass) {
    Block first = made.copies.take(kBytes);
    Block second = made.copies.take(kBytes);
    EXPECT_EQ(made.host->ledger().used(), 2 * kBytes);
    made.copies.give_back(std::move(first));
    made.copies.give_back(std::move(second));
    EXPECT_EQ(made.host->ledger().used(), 0U);
  }
  EXPECT_EQ(made.calls, 2);
}

TEST(OwnCopiesTest, NoMoreIsKeptThanWasSaid) {
  Made made(1 << 20, 2 * kBytes);
  std::vector<Block> blocks;
  for (int i = 0; i < 5; ++i) {
    blocks.push_back(made.copies.take(kBytes));
  }
  for (Block& block : blocks) {
    made.copies.give_back(std::move(block));
  }
  EXPECT_EQ(made.live->bytes(), 2 * kBytes);
  made.copies.end();
  EXPECT_EQ(made.live->bytes(), 0U);
  made.copies.give_back(made.copies.take(kBytes));
  EXPECT_EQ(made.live->bytes(), 0U);
}

TEST(OwnCopiesTest, TheHostPaysForACopy) {
  Made made(3 * kBytes, 4 * kBytes);
  const Block taken = made.copies.take(2 * kBytes);
  EXPECT_THROW(made.copies.take(2 * kBytes), OutOfMemory);
  EXPECT_EQ(made.host->ledger().used(), 2 * kBytes);
}

}  // namespace
}  // namespace castor::testing
