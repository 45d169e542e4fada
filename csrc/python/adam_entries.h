#pragma once

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "optim/adam.h"

namespace castor {

/// Returns the hyper-parameters of a group, from "lr", "beta1", "beta2", "eps", "weight_decay",
/// "decoupled" and "maximize".
[[nodiscard]] AdamOptions adam_options(const pybind11::dict& group);

/// The parameters of a standalone HybridAdam's step, from one dict each: tensors of equal numel and
/// layout on one device, and their hyper-parameters. Keeps the tensors alive. Internal to
/// csrc/python.
class AdamEntries {
 public:
  /// Collects the entries, and tells torch that the parameters have been written. Throws
  /// InvalidArgument for tensors of other types, layouts or devices than Adam needs. Needs the GIL.
  AdamEntries(const std::vector<pybind11::dict>& entries, c10::Device device);

  [[nodiscard]] std::span<const AdamSegment> segments() const noexcept { return segments_; }

 private:
  void append(const pybind11::dict& entry, c10::Device device);

  /// Tensors and options of an entry. `master` is the parameter itself when that is fp32, and
  /// absent in the split formats.
  struct Tensors {
    at::Tensor param, grad, exp_avg, exp_avg_sq;
    std::optional<at::Tensor> master;
    AdamOptions options;
    std::int64_t step;
  };

  /// The state of an entry whose format is not fp32, besides the moments.
  struct SplitTensors {
    at::Tensor remainder;
    std::optional<at::Tensor> scales;
    RoundingKey rounding;
  };

  static Tensors tensors_of(const pybind11::dict& entry);
  static SplitTensors split_tensors_of(const pybind11::dict& entry, std::int64_t step);

  std::deque<Tensors> tensors_;  // the segments hold pointers into these
  std::deque<SplitTensors> splits_;
  std::vector<AdamSegment> segments_;
};

}  // namespace castor
