// Parameters of 64 elements; their masters and states as one process keeps them, and as ranks do in
// C++ model tests of the stores.

#include "store/state_values.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/random_bytes.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

constexpr std::size_t kNumel = 64;
using Bytes = std::vector<std::byte>;

class StateValuesTest : public ::testing::TestWithParam<StateFormat> {
 protected:
  void make(StateFormat format, bool on_nvme = false) {
    rule_ = adam(format);
    const auto type = format == StateFormat::kFp32 ? ScalarType::kFloat32 : ScalarType::kBFloat16;
    store_ =
        std::make_unique<TestStore>(SmallModel::row(2, kNumel, type).layout(1 << 12, rule_.get()),
                                    StoreOptions{.rule = rule_,
                                                 .states_on_nvme = std::vector<bool>(1, on_nvme),
                                                 .directory = directory_.string()});
    values_ = std::make_unique<StateValues>(*store_->manager, store_->shards, *store_->states,
                                            store_->executor, rule_, *store_->copies, nullptr);
  }
  static std::vector<float> masters() {
    std::vector<float> values;
    for (std::size_t i = 0; i < kNumel; ++i) {
      values.push_back(std::sin(static_cast<float>(i) + 0.3F));
    }
    return values;
  }
  /// Writes masters and the rounded parameter.
  void adopt(ParamId param, const std::vector<float>& exact) const {
    values_->edit(param, [&](const ChunkMemory& memory) {
      store_->states->with_host_storage(param, [&](std::byte* host) {
        values_->write_master(memory, param, 0, exact);
        values_->write_rounded(host, param, 0, exact);
      });
    });
  }
  [[nodiscard]] std::vector<float> read_master(ParamId param) const {
    const Bytes weights = store_->read_weights(param);
    std::vector<float> values(kNumel);
    values_->read_master(param, kNumel, weights.data(), values.data());
    return values;
  }

  const test::TempDirectory directory_;
  std::shared_ptr<const UpdateRule> rule_;
  std::unique_ptr<TestStore> store_;
  std::unique_ptr<StateValues> values_;
};

TEST_F(StateValuesTest, OfFp32ParametersThereAreNoMasters) {
  make(StateFormat::kFp32);
  EXPECT_EQ(values_->format(), StateFormat::kFp32);
  EXPECT_EQ(values_->names(param_id(0)), (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  EXPECT_FALSE(values_->has_master(param_id(0)));
  EXPECT_FALSE(values_->splits_master(param_id(0)));
}

TEST_F(StateValuesTest, SplitMastersAreExactAndTheParameterIsTheirRoundedHalf) {
  make(StateFormat::kSplitBf16);
  EXPECT_TRUE(values_->has_master(param_id(1)));
  EXPECT_FALSE(values_->has_full_master(param_id(1)));
  adopt(param_id(1), masters());
  EXPECT_EQ(read_master(param_id(1)), masters());
  std::vector<float> piece(kNumel);
  const Bytes weights = store_->read_weights(param_id(1));
  values_->read_master_piece(param_id(1), weights.data(), piece.data());
  EXPECT_EQ(piece, masters());
}

TEST_F(StateValuesTest, APieceOfTheMasterIsWrittenInItsPlace) {
  make(StateFormat::kSplitBf16);
  adopt(param_id(0), std::vector<float>(kNumel, 1.0F));
  const std::vector<float> part{1.0F + 0x1p-12F, 1.0F + 0x1p-13F};
  values_->edit(param_id(0), [&](const ChunkMemory& memory) {
    values_->write_master(memory, param_id(0), 10, part);
  });
  std::vector<float> expected(kNumel, 1.0F);
  expected[10] = part[0];
  expected[11] = part[1];
  EXPECT_EQ(read_master(param_id(0)), expected);
}

TEST_F(StateValuesTest, ElementsThatUsersChangeBecomeTheirOwnMasters) {
  make(StateFormat::kSplitBf16);
  const ParamId param = param_id(0);
  adopt(param, masters());
  const Bytes before = store_->read_weights(param);
  Bytes after = before;
  const auto three = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(3.0F) >> 16U);
  std::memcpy(after.data() + 2 * 5, &three, 2);
  values_->forget_changed(param, before.data(), after.data());
  store_->write_weights(param, after);
  std::vector<float> expected = masters();
  expected[5] = 3.0F;
  EXPECT_EQ(read_master(param), expected);
}

TEST_F(StateValuesTest, WriteBacksOfAChunkTakeUpItsChangedElements) {
  make(StateFormat::kSplitBf16);
  adopt(param_id(0), masters());
  adopt(param_id(1), masters());
  const ChunkId chunk = store_->layout.place(param_id(0)).chunk;
  const std::byte* const host = store_->states->weights(chunk).data();
  const std::size_t bytes = store_->layout.chunk(chunk).used_bytes;
  Bytes slot(host, host + bytes);
  const auto three = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(3.0F) >> 16U);
  std::memcpy(slot.data(), &three, 2);
  values_->before_write_back(chunk, host, slot.data());
  std::memcpy(const_cast<std::byte*>(host), slot.data(), bytes);
  std::vector<float> expected = masters();
  expected[0] = 3.0F;
  EXPECT_EQ(read_master(param_id(0)), expected);
  EXPECT_EQ(read_master(param_id(1)), masters());
}

TEST_F(StateValuesTest, StatesComeBackAsTheyWereWrittenAlsoFromNvme) {
  for (const bool on_nvme : {false, true}) {
    make(StateFormat::kFp32, on_nvme);
    const ParamId param = param_id(1);
    const std::vector<Bytes> states{random_bytes(4 * kNumel, 1), random_bytes(4 * kNumel, 2)};
    const std::vector<const std::byte*> addresses{states[0].data(), states[1].data()};
    values_->write(param, addresses);
    std::vector<Bytes> pieces;
    values_->read_pieces(param, [&](std::size_t state, std::size_t bytes) {
      EXPECT_EQ(state, pieces.size());
      return static_cast<void*>(pieces.emplace_back(bytes).data());
    });
    EXPECT_EQ(pieces, states);
    for (std::size_t i = 0; i < 2; ++i) {
      Bytes full(4 * kNumel);
      values_->read(param, i, full.data());
      EXPECT_EQ(full, states[i]);
    }
  }
}

TEST_F(StateValuesTest, ZeroClearsTheStatesInMemory) {
  make(StateFormat::kFp32);
  const Bytes state = random_bytes(4 * kNumel, 1);
  values_->write(param_id(0), std::vector<const std::byte*>{state.data(), state.data()});
  values_->zero([](const Payload&) { FAIL() << "nothing is on a device"; });
  Bytes full(4 * kNumel, std::byte{1});
  values_->read(param_id(0), 1, full.data());
  EXPECT_EQ(full, Bytes(4 * kNumel));
}

}  // namespace
}  // namespace castor::testing
