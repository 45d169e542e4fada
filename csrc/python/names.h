#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/device_reduction.h"
#include "core/error.h"
#include "core/hardware.h"
#include "core/overlap.h"
#include "core/pipeline_schedule.h"
#include "core/placement.h"
#include "core/run_load.h"
#include "core/scalar_type.h"
#include "core/timeline.h"
#include "core/trace.h"
#include "optim/state_format.h"

namespace castor {

/// Python's names for the values of an enum: the only place for these strings. Such an enum passes
/// the binding as its name, and castor._C.NAMES has all of them by kName.
template <typename Enum>
struct Names;

template <>
struct Names<ScalarType> {
  static constexpr std::string_view kName = "scalar_type";
  static constexpr std::pair<ScalarType, std::string_view> kAll[] = {
      {ScalarType::kFloat32, to_string(ScalarType::kFloat32)},
      {ScalarType::kBFloat16, to_string(ScalarType::kBFloat16)},
      {ScalarType::kFloat16, to_string(ScalarType::kFloat16)}};
};

template <>
struct Names<StateFormat> {
  static constexpr std::string_view kName = "state_format";
  static constexpr std::pair<StateFormat, std::string_view> kAll[] = {
      {StateFormat::kFp32, to_string(StateFormat::kFp32)},
      {StateFormat::kSplit, to_string(StateFormat::kSplit)},
      {StateFormat::kSplitBf16, to_string(StateFormat::kSplitBf16)},
      {StateFormat::kSplitInt8, to_string(StateFormat::kSplitInt8)}};
};

template <>
struct Names<PlacementPolicy> {
  static constexpr std::string_view kName = "placement_policy";
  static constexpr std::pair<PlacementPolicy, std::string_view> kAll[] = {
      {PlacementPolicy::kAuto, "auto"},
      {PlacementPolicy::kCpu, "cpu"},
      {PlacementPolicy::kCuda, "cuda"},
      {PlacementPolicy::kStatic, "static"}};
};

template <>
struct Names<Reduction> {
  static constexpr std::string_view kName = "reduction";
  static constexpr std::pair<Reduction, std::string_view> kAll[] = {
      {Reduction::kOrdered, "ordered"}, {Reduction::kBackend, "backend"}};
};

template <>
struct Names<ReducedOn> {
  static constexpr std::string_view kName = "reduced_on";
  static constexpr std::pair<ReducedOn, std::string_view> kAll[] = {{ReducedOn::kHost, "host"},
                                                                    {ReducedOn::kDevice, "device"}};
};

template <>
struct Names<Overlap> {
  static constexpr std::string_view kName = "overlap";
  static constexpr std::pair<Overlap, std::string_view> kAll[] = {
      {Overlap::kNone, "none"}, {Overlap::kForward, "forward"}, {Overlap::kBackward, "backward"}};
};

template <>
struct Names<LoadedWeights> {
  static constexpr std::string_view kName = "loaded_weights";
  static constexpr std::pair<LoadedWeights, std::string_view> kAll[] = {
      {LoadedWeights::kNone, "none"}, {LoadedWeights::kSome, "some"}, {LoadedWeights::kAll, "all"}};
};

template <>
struct Names<EventKind> {
  static constexpr std::string_view kName = "event_kind";
  static constexpr std::pair<EventKind, std::string_view> kAll[] = {
      {EventKind::kForwardEnter, "forward_enter"},
      {EventKind::kForwardExit, "forward_exit"},
      {EventKind::kBackwardEnter, "backward_enter"},
      {EventKind::kGradReady, "grad_ready"}};
};

template <>
struct Names<TransferKind> {
  static constexpr std::string_view kName = "transfer_kind";
  static constexpr std::pair<TransferKind, std::string_view> kAll[] = {
      {TransferKind::kFetch, "fetch"},
      {TransferKind::kEviction, "eviction"},
      {TransferKind::kGradient, "gradient"}};
};

template <>
struct Names<TransferCause> {
  static constexpr std::string_view kName = "transfer_cause";
  static constexpr std::pair<TransferCause, std::string_view> kAll[] = {
      {TransferCause::kDemand, "demand"},    {TransferCause::kPrefetch, "prefetch"},
      {TransferCause::kPlan, "plan"},        {TransferCause::kPressure, "pressure"},
      {TransferCause::kStepEnd, "step_end"}, {TransferCause::kBackward, "backward"}};
};

template <>
struct Names<Guidance> {
  static constexpr std::string_view kName = "guidance";
  static constexpr std::pair<Guidance, std::string_view> kAll[] = {
      {Guidance::kDemand, "demand"}, {Guidance::kPlan, "plan"}, {Guidance::kDiverged, "diverged"}};
};

template <>
struct Names<CopyMode> {
  static constexpr std::string_view kName = "copy_mode";
  static constexpr std::pair<CopyMode, std::string_view> kAll[] = {
      {CopyMode::kOverlapped, "overlapped"}, {CopyMode::kSynchronous, "synchronous"}};
};

template <>
struct Names<UpdateCores> {
  static constexpr std::string_view kName = "update_cores";
  static constexpr std::pair<UpdateCores, std::string_view> kAll[] = {
      {UpdateCores::kOwn, "own"}, {UpdateCores::kShared, "shared"}};
};

template <>
struct Names<PipelineStyle> {
  static constexpr std::string_view kName = "pipeline_style";
  static constexpr std::pair<PipelineStyle, std::string_view> kAll[] = {
      {PipelineStyle::k1f1b, to_string(PipelineStyle::k1f1b)},
      {PipelineStyle::kGpipe, to_string(PipelineStyle::kGpipe)},
      {PipelineStyle::kInterleaved, to_string(PipelineStyle::kInterleaved)},
      {PipelineStyle::kZbv, to_string(PipelineStyle::kZbv)}};
};

template <>
struct Names<PipelinePass> {
  static constexpr std::string_view kName = "pipeline_pass";
  static constexpr std::pair<PipelinePass, std::string_view> kAll[] = {
      {PipelinePass::kForward, to_string(PipelinePass::kForward)},
      {PipelinePass::kBackward, to_string(PipelinePass::kBackward)},
      {PipelinePass::kOfInputs, to_string(PipelinePass::kOfInputs)},
      {PipelinePass::kOfWeights, to_string(PipelinePass::kOfWeights)}};
};

template <typename Enum>
concept NamedEnum = std::is_enum_v<Enum> && requires {
  Names<Enum>::kName;
};

template <NamedEnum Enum>
[[nodiscard]] std::string name_of(Enum value) {
  for (const auto& [known, name] : Names<Enum>::kAll) {
    if (known == value) {
      return std::string(name);
    }
  }
  return "unknown";
}

/// Returns the value with this name. Throws InvalidArgument, with the names there are.
template <NamedEnum Enum>
[[nodiscard]] Enum value_named(std::string_view name) {
  std::string known;
  for (const auto& [value, spelling] : Names<Enum>::kAll) {
    if (name == spelling) {
      return value;
    }
    known += (known.empty() ? "'" : ", '") + std::string(spelling) + "'";
  }
  throw InvalidArgument("unknown " + std::string(Names<Enum>::kName) + " '" + std::string(name) +
                        "'; there are " + known);
}

}  // namespace castor

namespace pybind11::detail {

template <castor::NamedEnum Enum>
struct type_caster_enum_type_enabled<Enum> : std::false_type {};

template <castor::NamedEnum Enum>
class type_caster<Enum> {
 public:
  PYBIND11_TYPE_CASTER(Enum, const_name("str"));

  bool load(handle source, bool /*convert*/) {
    if (!isinstance<str>(source)) {
      return false;
    }
    value = castor::value_named<Enum>(source.cast<std::string>());
    return true;
  }
  static handle cast(Enum value, return_value_policy /*policy*/, handle /*parent*/) {
    return str(castor::name_of(value)).release();
  }
};

}  // namespace pybind11::detail
