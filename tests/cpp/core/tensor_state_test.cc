#include "core/tensor_state.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

namespace castor {
namespace {

// The table of tensor_state.h, in full: an edge that is not listed is illegal.
TEST(TensorStateTest, EveryEdgeIsAsStated) {
  using enum TensorState;
  const std::set<std::pair<TensorState, TensorState>> legal = {
      {kFree, kHold},                         // fetch
      {kFree, kReadyForReduce},               // the gradient arrives after the chunk left
      {kHold, kFree},                         // eviction
      {kHold, kCompute},                      // enter
      {kHold, kReadyForReduce},               // the gradient of another user arrives
      {kCompute, kHold},                      // forward exit
      {kCompute, kHoldAfterBackward},         // backward moved on
      {kCompute, kReadyForReduce},            // gradient
      {kHoldAfterBackward, kFree},            // eviction
      {kHoldAfterBackward, kCompute},         // enter
      {kHoldAfterBackward, kReadyForReduce},  // gradient
      {kReadyForReduce, kFree},               // reduced, not resident
      {kReadyForReduce, kHold},               // reduced, resident
  };
  const TensorState all[] = {kFree, kHold, kCompute, kHoldAfterBackward, kReadyForReduce};
  static_assert(std::size(all) == kNumTensorStates);
  for (const TensorState from : all) {
    for (const TensorState to : all) {
      EXPECT_EQ(can_transition(from, to), legal.contains({from, to}))
          << to_string(from) << " -> " << to_string(to);
    }
  }
}

TEST(TensorStateTest, NamesAreThoseOfTheDesign) {
  EXPECT_EQ(to_string(TensorState::kFree), "FREE");
  EXPECT_EQ(to_string(TensorState::kHold), "HOLD");
  EXPECT_EQ(to_string(TensorState::kCompute), "COMPUTE");
  EXPECT_EQ(to_string(TensorState::kHoldAfterBackward), "HOLD_AFTER_BACKWARD");
  EXPECT_EQ(to_string(TensorState::kReadyForReduce), "READY_FOR_REDUCE");
}

}  // namespace
}  // namespace castor
