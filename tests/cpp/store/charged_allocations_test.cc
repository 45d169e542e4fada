#include "store/charged_allocations.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

namespace castor::testing {
namespace {

std::shared_ptr<NonModelMemory> account() {
  return std::make_shared<NonModelMemory>(std::make_shared<Ledger>(TierKind::kDevice, 1 << 20));
}

void* address(std::uint64_t number) { return reinterpret_cast<void*>(64 * (number + 1)); }

TEST(ChargedAllocationsTest, AChargeIsTakenOnce) {
  ChargedAllocations charges;
  const auto payer = account();
  charges.add(address(1), {payer, 100});
  EXPECT_EQ(charges.take(address(2)).account, nullptr);
  const auto charge = charges.take(address(1));
  EXPECT_EQ(charge.account, payer);
  EXPECT_EQ(charge.bytes, 100U);
  EXPECT_EQ(charges.take(address(1)).account, nullptr);
}

TEST(ChargedAllocationsTest, SeededChargesInAnyOrderAreThoseOfAMap) {
  ChargedAllocations charges;
  const auto payer = account();
  std::unordered_map<std::uint64_t, std::size_t> model;
  std::mt19937_64 random(3);
  for (int i = 0; i < 200'000; ++i) {
    const std::uint64_t number = random() % 4096;
    if (model.contains(number)) {
      ASSERT_EQ(charges.take(address(number)).bytes, model[number]);
      model.erase(number);
    } else {
      ASSERT_EQ(charges.take(address(number)).account, nullptr);
      model[number] = random() % 1000 + 1;
      charges.add(address(number), {payer, model[number]});
    }
  }
}

TEST(ChargedAllocationsTest, ThreadsFindTheirOwnCharges) {
  ChargedAllocations charges;
  const auto payer = account();
  std::vector<std::jthread> threads;
  for (std::uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t i = 0; i < 2000; ++i) {
        charges.add(address(4 * i + thread), {payer, i + 1});
      }
      for (std::uint64_t i = 0; i < 2000; ++i) {
        EXPECT_EQ(charges.take(address(4 * i + thread)).bytes, i + 1);
      }
    });
  }
}

}  // namespace
}  // namespace castor::testing
