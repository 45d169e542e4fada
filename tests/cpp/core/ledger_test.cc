#include "core/ledger.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"

namespace castor {
namespace {

static_assert(!std::is_copy_constructible_v<Reservation>);
static_assert(!std::is_copy_assignable_v<Reservation>);
static_assert(std::is_nothrow_move_constructible_v<Reservation>);
static_assert(std::is_nothrow_move_assignable_v<Reservation>);
static_assert(!std::is_copy_constructible_v<Ledger> && !std::is_move_constructible_v<Ledger>);

TEST(LedgerTest, RejectsABudgetOfNothing) {
  EXPECT_THROW(Ledger(TierKind::kHost, 0), InvalidArgument);
}

TEST(LedgerTest, ReservationHoldsItsBytesUntilItEnds) {
  Ledger ledger(TierKind::kDevice, 100);
  {
    const auto reservation = ledger.try_reserve(60);
    ASSERT_TRUE(reservation.has_value());
    EXPECT_EQ(reservation->bytes(), 60u);
    EXPECT_EQ(ledger.used(), 60u);
    EXPECT_EQ(ledger.available(), 40u);
  }
  EXPECT_EQ(ledger.used(), 0u);
  EXPECT_EQ(ledger.peak(), 60u);
}

TEST(LedgerTest, ExactFitFitsAndOneByteMoreDoesNot) {
  Ledger ledger(TierKind::kDevice, 100);
  const auto first = ledger.try_reserve(99);
  const auto last = ledger.try_reserve(1);
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(ledger.available(), 0u);
  EXPECT_FALSE(ledger.try_reserve(1).has_value());
  EXPECT_EQ(ledger.used(), 100u) << "a refusal takes nothing";
  EXPECT_EQ(ledger.peak(), 100u);
}

TEST(LedgerTest, AWindowsPeakStartsAtWhatIsHeld) {
  Ledger ledger(TierKind::kDevice, 100);
  ASSERT_TRUE(ledger.try_take(70));
  ledger.give_back(40);
  EXPECT_EQ(ledger.take_window_peak(), 70u);
  EXPECT_EQ(ledger.take_window_peak(), 30u);
  ASSERT_TRUE(ledger.try_take(20));
  EXPECT_FALSE(ledger.try_take(60));
  ledger.give_back(50);
  EXPECT_EQ(ledger.take_window_peak(), 50u);
  EXPECT_EQ(ledger.take_window_peak(), 0u);
  EXPECT_EQ(ledger.peak(), 70u);
}

TEST(LedgerTest, ZeroBytesFitAFullBudget) {
  Ledger ledger(TierKind::kDevice, 1);
  const auto all = ledger.try_reserve(1);
  const auto nothing = ledger.try_reserve(0);
  ASSERT_TRUE(nothing.has_value());
  EXPECT_EQ(nothing->bytes(), 0u);
  EXPECT_EQ(ledger.used(), 1u);
}

TEST(LedgerTest, SizesThatWouldWrapAreRefused) {
  Ledger ledger(TierKind::kDevice, 100);
  const auto some = ledger.try_reserve(50);
  EXPECT_FALSE(ledger.try_take(std::numeric_limits<std::size_t>::max()));
  EXPECT_FALSE(ledger.try_take(std::numeric_limits<std::size_t>::max() - 49));
  EXPECT_EQ(ledger.used(), 50u);
}

TEST(LedgerTest, RefusalCarriesTheFiguresAndTheRemedy) {
  Ledger ledger(TierKind::kHost, 2048);
  const auto some = ledger.reserve(1024, "");
  try {
    (void)ledger.reserve(1025, "Buy more.");
    FAIL() << "no throw";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.tier(), TierKind::kHost);
    EXPECT_EQ(error.requested(), 1025u);
    EXPECT_EQ(error.available(), 1024u);
    EXPECT_EQ(error.budget(), 2048u);
    EXPECT_STREQ(error.what(),
                 "out of host memory: requested 1.00 KiB (1025 bytes), available 1.00 KiB (1024 "
                 "bytes) of a budget of 2.00 KiB (2048 bytes). Buy more.");
  }
  EXPECT_EQ(ledger.used(), 1024u);
}

TEST(LedgerTest, MovedReservationPaysOnce) {
  Ledger ledger(TierKind::kDevice, 100);
  Reservation first = ledger.reserve(10, "");
  Reservation second = std::move(first);
  EXPECT_EQ(first.bytes(), 0u);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(second.bytes(), 10u);
  EXPECT_EQ(ledger.used(), 10u);
  Reservation third = ledger.reserve(30, "");
  third = std::move(second);
  EXPECT_EQ(ledger.used(), 10u) << "the target's own bytes went back";
  Reservation& same = third;
  third = std::move(same);
  EXPECT_EQ(third.bytes(), 10u);
  third.release();
  third.release();
  EXPECT_EQ(ledger.used(), 0u);
}

TEST(LedgerTest, UntrackedBytesShareTheBudget) {
  Ledger ledger(TierKind::kDevice, 100);
  EXPECT_TRUE(ledger.try_take(70));
  EXPECT_FALSE(ledger.try_reserve(31).has_value());
  ledger.give_back(70);
  EXPECT_EQ(ledger.used(), 0u);
}

TEST(LedgerTest, RaiseToNeverLowers) {
  std::atomic<std::size_t> maximum{5};
  raise_to(maximum, 3);
  EXPECT_EQ(maximum, 5u);
  raise_to(maximum, 9);
  EXPECT_EQ(maximum, 9u);
}

// Each thread counts what it holds before the ledger gives it back and after the ledger granted it:
// the sum over the threads can then never exceed the budget unless the ledger let it.
TEST(LedgerTest, ThreadsTogetherNeverPassTheBudget) {
  constexpr std::size_t kBudget = 1000;
  constexpr int kThreads = 4;
  constexpr int kRounds = 20000;
  Ledger ledger(TierKind::kDevice, kBudget);
  std::atomic<std::size_t> held{0};
  std::atomic<std::size_t> granted{0};
  std::atomic<int> violations{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::pair<Reservation, std::size_t>> mine;
      for (int i = 0; i < kRounds; ++i) {
        const std::size_t bytes = random() % 400;
        if (auto reservation = ledger.try_reserve(bytes)) {
          ++granted;
          violations += held.fetch_add(bytes) + bytes > kBudget ? 1 : 0;
          mine.emplace_back(std::move(*reservation), bytes);
        }
        violations += ledger.used() > kBudget ? 1 : 0;
        if (!mine.empty() && random() % 2 == 0) {
          held -= mine.back().second;
          mine.pop_back();
        }
      }
      for (const auto& [reservation, bytes] : mine) {
        held -= bytes;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(violations, 0);
  EXPECT_GT(granted, 0u);
  EXPECT_EQ(held, 0u);
  EXPECT_EQ(ledger.used(), 0u);
  EXPECT_LE(ledger.peak(), kBudget);
}

}  // namespace
}  // namespace castor
