// Two layers of four experts with two parameters each: rows of 16 and of 8 bytes.

#include "store/expert_cache.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "core/error.h"
#include "parallel/async_copy_engine.h"
#include "parallel/immediate_copy_engine.h"
#include "store/charged_memory.h"
#include "store/fake_device.h"
#include "store/fake_experts.h"
#include "store/small_model.h"

namespace castor::testing {
namespace {

constexpr std::int64_t kExperts = 4;
constexpr std::size_t kExpertBytes = 16 + 8;
constexpr std::size_t kLayerBytes = kExperts * kExpertBytes;
constexpr std::size_t kThreePlaces = 3 * kExpertBytes;

class ExpertCacheTest : public ::testing::Test {
 protected:
  /// `budget`: device bytes beside the chunk of the model that passes stream.
  void make(std::size_t budget, CopyEngine* copies = nullptr) {
    for (const ChunkSpec& chunk : layout_.chunks()) {
      budget += chunk.by_row ? 0 : chunk.capacity_bytes;
    }
    ledger_ = std::make_shared<Ledger>(TierKind::kDevice, budget);
    account_ = std::make_shared<NonModelMemory>(ledger_);
    std::vector<ExpertLayer> layers;
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      layers.push_back({.params = {ParamId{2 * layer}, ParamId{2 * layer + 1}},
                        .row_bytes = {16, 8},
                        .num_experts = kExperts});
    }
    cache_.emplace(ExpertParts{.model = model_,
                               .layout = layout_,
                               .device = *ledger_,
                               .nonmodel = *account_,
                               .copies = copies == nullptr ? immediate_ : *copies,
                               .compute = device_,
                               .take = charged_to(account_)},
                   std::move(layers));
  }
  /// Runs a call, and checks that it has the rows that the host has.
  void call(std::size_t layer, const std::vector<std::int64_t>& experts) {
    const auto rows = cache_->fetch(layer, experts);
    ASSERT_TRUE(rows.has_value());
    for (std::size_t param = 0; param < 2; ++param) {
      cache_->await(layer, param);
      const std::size_t bytes = param == 0 ? 16 : 8;
      const auto number = static_cast<std::uint32_t>(2 * layer + param);
      for (std::size_t i = 0; i < experts.size(); ++i) {
        const auto place = static_cast<std::size_t>(rows->places[i]);
        EXPECT_LT(rows->places[i], rows->num_places);
        EXPECT_EQ(std::memcmp(rows->params[param]->data() + place * bytes,
                              model_.on_host(ParamId{number}) +
                                  static_cast<std::size_t>(experts[i]) * bytes,
                              bytes),
                  0)
            << "layer " << layer << ", parameter " << param << ", expert " << experts[i];
      }
    }
    cache_->release(layer);
  }
  void expect(std::uint64_t hits, std::uint64_t misses, std::size_t bytes) const {
    const ExpertCache::Figures figures = cache_->figures();
    EXPECT_EQ(figures.hits, hits);
    EXPECT_EQ(figures.misses, misses);
    EXPECT_EQ(figures.fetched_bytes, misses * kExpertBytes);
    EXPECT_EQ(figures.cache_bytes, bytes);
    EXPECT_EQ(account_->bytes(), bytes);
  }

  static ChunkLayout model() {
    SmallModel model;
    for (int layer = 0; layer < 2; ++layer) {
      model.add(kExperts * 4).add(kExperts * 2);
    }
    for (ParamSpec& param : model.params) {
      param.by_row = true;
    }
    model.add(64);
    return model.layout(256);
  }

  const ChunkLayout layout_ = model();
  const SessionDevice device_{std::make_shared<FakeDevice>()};
  ImmediateCopyEngine immediate_;
  FakeExperts model_{layout_};
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<NonModelMemory> account_;
  std::optional<ExpertCache> cache_;
};

TEST_F(ExpertCacheTest, ExpertsThatACallNeedsAgainAreThere) {
  make(2 * kLayerBytes);
  call(0, {1, 3});
  expect(0, 2, kLayerBytes);
  call(0, {3, 1, 0});
  expect(2, 3, kLayerBytes);
}

TEST_F(ExpertCacheTest, TheLeastRecentlyUsedGivesItsPlace) {
  make(2 * 2 * kExpertBytes);  // a share of two experts for each layer
  call(0, {0, 1});
  call(0, {0, 2});  // over 1
  expect(1, 3, 2 * kExpertBytes);
  call(0, {0});
  expect(2, 3, 2 * kExpertBytes);
  call(0, {1});  // over 2
  call(0, {0, 1});
  expect(4, 4, 2 * kExpertBytes);
}

TEST_F(ExpertCacheTest, ACallThatHasNoRoomInItsShareTakesMemoryForItself) {
  make(2 * kExpertBytes);  // one expert for each layer
  call(0, {0, 1});
  expect(0, 2, 0);
  call(0, {0, 1});
  expect(0, 4, 0);
}

TEST_F(ExpertCacheTest, BytesThatStayOnTheDeviceLeaveLessForTheCache) {
  make(2 * kLayerBytes);
  model_.lasting = 2 * kLayerBytes - 4 * kExpertBytes;
  call(0, {0, 1});
  expect(0, 2, 2 * kExpertBytes);
}

TEST_F(ExpertCacheTest, RowsThatWereWrittenComeAgain) {
  make(2 * kLayerBytes);
  call(0, {0, 1});
  call(1, {0, 1});
  model_.write(ParamId{1});
  call(0, {0, 1});
  EXPECT_GE(cache_->figures().misses, 6U);
}

TEST_F(ExpertCacheTest, WhereAPassStreamsLayersNothingIsFetched) {
  make(2 * kLayerBytes);
  model_.rows = false;
  EXPECT_FALSE(cache_->fetch(0, std::vector<std::int64_t>{1}).has_value());
  model_.rows = true;
  EXPECT_FALSE(cache_->fetch(0, {}).has_value());
  expect(0, 0, 0);
}

TEST_F(ExpertCacheTest, LayersThatNoCallUsesGiveWayTheLargestFirst) {
  make(2 * kLayerBytes);
  call(0, {0});
  call(1, {0});
  expect(0, 2, 2 * kLayerBytes);
  const auto rows = cache_->fetch(1, std::vector<std::int64_t>{0});
  EXPECT_TRUE(cache_->give_up(1));
  EXPECT_EQ(cache_->figures().cache_bytes, kLayerBytes);
  EXPECT_FALSE(cache_->give_up(1)) << "the other layer is in use";
  cache_->release(1);
  cache_->clear();
  EXPECT_EQ(cache_->figures().cache_bytes, 0U);
}

TEST_F(ExpertCacheTest, AFailedCopyIsToldOnceAndItsExpertsComeAgain) {
  bool fails = true;
  AsyncCopyEngine copies({.copy = [&](const CopyRequest& request) {
    if (fails) {
      throw Error("the link is down");
    }
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }});
  make(2 * kLayerBytes, &copies);
  static_cast<void>(cache_->fetch(0, std::vector<std::int64_t>{0, 1}));
  EXPECT_THROW(cache_->release(0), Error);
  fails = false;
  call(0, {0, 1});
  expect(0, 4, kLayerBytes);
}

TEST_F(ExpertCacheTest, ACallWithoutRoomOnTheDeviceThrowsAndLeavesTheLayerFree) {
  make(2 * kLayerBytes);
  const Reservation rest = ledger_->reserve(ledger_->available(), "");
  EXPECT_THROW(static_cast<void>(cache_->fetch(0, std::vector<std::int64_t>{0})), OutOfMemory);
  expect(0, 0, 0);
  EXPECT_FALSE(cache_->give_up(1));
}

TEST_F(ExpertCacheTest, AGuessIsThereWhenACallNeedsIt) {
  make(2 * kThreePlaces);
  cache_->guess(0, std::vector<std::int64_t>{3});  // from here on a place is kept
  call(0, {0, 1});
  cache_->guess(0, std::vector<std::int64_t>{0, 2, 3});
  EXPECT_EQ(cache_->figures().guessed_bytes, kExpertBytes) << "0 is there, 2 is the likeliest";
  call(0, {0, 2});
  expect(2, 2, kThreePlaces);
  EXPECT_EQ(cache_->figures().right_guesses, 1U);
}

TEST_F(ExpertCacheTest, AGuessTakesThePlaceOfNoExpertThatACallNeeds) {
  make(2 * kThreePlaces);
  cache_->guess(0, std::vector<std::int64_t>{0});
  call(0, {0, 1});
  cache_->guess(0, std::vector<std::int64_t>{2});
  cache_->guess(0, std::vector<std::int64_t>{3});  // over the guess that was wrong
  call(0, {0, 1});
  expect(2, 2, kThreePlaces);
  EXPECT_EQ(cache_->figures().guessed_bytes, 2 * kExpertBytes);
  call(0, {3, 0});  // right, though late: now 1 gives its place to guesses
  expect(4, 2, kThreePlaces);
  EXPECT_EQ(cache_->figures().right_guesses, 1U);
  call(0, {1});
  expect(4, 3, kThreePlaces);
}

TEST_F(ExpertCacheTest, ALayerWithRoomForAllExpertsKeepsNoPlaceForGuesses) {
  make(2 * kLayerBytes);
  cache_->guess(0, std::vector<std::int64_t>{3});
  call(0, {0, 1});
  cache_->guess(0, std::vector<std::int64_t>{3});
  call(0, {2, 3});
  call(0, {0, 1, 2, 3});
  expect(4, 4, kLayerBytes);
  EXPECT_EQ(cache_->figures().guessed_bytes, 0U);
}

TEST_F(ExpertCacheTest, OneOfTheLikelyExpertsIsCopiedOnce) {
  make(2 * kThreePlaces);
  cache_->guess(0, std::vector<std::int64_t>{0});
  call(0, {0});
  cache_->guess(0, std::vector<std::int64_t>{1, 2});
  cache_->guess(0, std::vector<std::int64_t>{2, 1});
  cache_->guess(0, std::vector<std::int64_t>{0});
  EXPECT_EQ(cache_->figures().guessed_bytes, kExpertBytes) << "1, which stays";
}

TEST_F(ExpertCacheTest, ACallThatNeedsAllPlacesTakesTheOneForGuessesToo) {
  make(2 * 2 * kExpertBytes);  // two places for each layer
  cache_->guess(0, std::vector<std::int64_t>{0});
  call(0, {0});
  cache_->guess(0, std::vector<std::int64_t>{1});
  call(0, {2, 3});
  cache_->guess(0, std::vector<std::int64_t>{1});
  expect(0, 3, 2 * kExpertBytes);
  EXPECT_EQ(cache_->figures().guessed_bytes, kExpertBytes) << "no place was left for the second";
  call(0, {2});
  expect(1, 3, 2 * kExpertBytes);
}

TEST_F(ExpertCacheTest, AGuessOfRowsThatWereWrittenSinceComesAgain) {
  make(2 * kThreePlaces);
  cache_->guess(0, std::vector<std::int64_t>{0});
  call(0, {0});
  cache_->guess(0, std::vector<std::int64_t>{1});
  model_.write(ParamId{0});
  call(0, {1});
  EXPECT_EQ(cache_->figures().right_guesses, 0U);
}

TEST_F(ExpertCacheTest, GuessesAreLeftOutWhereNothingIsFetchedAndWhereALayerHasGivenWay) {
  make(2 * kThreePlaces);
  cache_->guess(0, std::vector<std::int64_t>{0});
  call(0, {0});
  model_.rows = false;
  cache_->guess(0, std::vector<std::int64_t>{1});
  model_.rows = true;
  cache_->clear();
  cache_->guess(0, std::vector<std::int64_t>{1});
  EXPECT_EQ(cache_->figures().guessed_bytes, 0U);
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST_F(ExpertCacheTest, AWrongGuessIsNotWaitedForAndItsMemoryOutlivesItsCopy) {
  std::mutex link;
  AsyncCopyEngine copies({.copy = [&](const CopyRequest& request) {
    const std::lock_guard lock(link);
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }});
  make(2 * kThreePlaces, &copies);
  cache_->guess(0, std::vector<std::int64_t>{0});
  call(0, {0});
  {
    const std::lock_guard down(link);
    cache_->guess(0, std::vector<std::int64_t>{1});
    call(0, {0});
  }
  cache_->clear();
  EXPECT_EQ(account_->bytes(), 0U);
  cache_.reset();
}

TEST_F(ExpertCacheTest, AGuessWhoseCopyFailedIsToldToTheCallThatNeedsIt) {
  bool fails = false;
  AsyncCopyEngine copies({.copy = [&](const CopyRequest& request) {
    if (fails) {
      throw Error("the link is down");
    }
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }});
  make(2 * kThreePlaces, &copies);
  cache_->guess(0, std::vector<std::int64_t>{0});
  call(0, {0});
  fails = true;
  cache_->guess(0, std::vector<std::int64_t>{1});
  const auto rows = cache_->fetch(0, std::vector<std::int64_t>{1});
  ASSERT_TRUE(rows.has_value());
  EXPECT_THROW(cache_->await(0, 0), Error);
  EXPECT_THROW(cache_->release(0), Error);
  fails = false;
  call(0, {0, 1});
  EXPECT_EQ(cache_->figures().misses, 3U);
}

}  // namespace
}  // namespace castor::testing
