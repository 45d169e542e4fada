#pragma once

#include <cstdint>
#include <string_view>

namespace castor {

/// State of a parameter. Gradients have a payload of their own, so a parameter may leave the device
/// while its gradient waits (kReadyForReduce).
enum class TensorState : std::uint8_t {
  kFree,               ///< no device copy: reads go to the host copy
  kHold,               ///< device copy present, nobody computes on it
  kCompute,            ///< an operator of a running module may read it
  kHoldAfterBackward,  ///< its module's backward was left, its gradient has not arrived
  kReadyForReduce,     ///< gradient complete in its payload, waiting for the rest of the chunk
};

inline constexpr int kNumTensorStates = 5;

[[nodiscard]] constexpr std::string_view to_string(TensorState state) noexcept {
  switch (state) {
    case TensorState::kFree: return "FREE";
    case TensorState::kHold: return "HOLD";
    case TensorState::kCompute: return "COMPUTE";
    case TensorState::kHoldAfterBackward: return "HOLD_AFTER_BACKWARD";
    case TensorState::kReadyForReduce: return "READY_FOR_REDUCE";
  }
  return "unknown";
}

/// Returns whether the one transition table has this edge. Rows are the state left, columns the
/// state entered, in enum order.
///   FREE -> HOLD on fetch; HOLD, HOLD_AFTER_BACKWARD -> FREE on eviction
///   HOLD, HOLD_AFTER_BACKWARD -> COMPUTE on enter; COMPUTE -> HOLD on forward exit
///   COMPUTE -> HOLD_AFTER_BACKWARD when backward moves on to another module
///   any but READY_FOR_REDUCE -> READY_FOR_REDUCE when the gradient arrives
///   READY_FOR_REDUCE -> HOLD | FREE after the reduction, by residency
[[nodiscard]] constexpr bool can_transition(TensorState from, TensorState to) noexcept {
  constexpr bool kAllowed[kNumTensorStates][kNumTensorStates] = {
      // FREE   HOLD   COMPUTE HOLD_AB READY
      {false, true, false, false, true},   // FREE
      {true, false, true, false, true},    // HOLD
      {false, true, false, true, true},    // COMPUTE
      {true, false, true, false, true},    // HOLD_AFTER_BACKWARD
      {true, true, false, false, false}};  // READY_FOR_REDUCE
  return kAllowed[static_cast<int>(from)][static_cast<int>(to)];
}

}  // namespace castor
