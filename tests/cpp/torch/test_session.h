#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/fakes.h"
#include "store/session_options.h"
#include "store/small_model.h"
#include "torch/session.h"

// A model in plain libtorch, the driver that a session needs around it, and the training that it is
// compared with.
namespace castor::testing {

/// Differentiable model in plain libtorch: layers of `tanh(x W^T + b)`. Layer i is module i + 1 of
/// a session; module 0 encloses them. Several layers may use one parameter.
struct TestModel {
  struct Layer {
    std::size_t weight = 0;
    std::optional<std::size_t> bias;
  };
  std::vector<at::Tensor> params;
  std::vector<Layer> layers;
  std::vector<bool> trained;                     ///< per parameter
  std::vector<std::optional<ScalarType>> types;  ///< as Session::create takes them

  /// Makes float32 layers of `width` inputs and outputs, each with a weight and a bias, from a
  /// seed.
  [[nodiscard]] static TestModel layers_of(std::size_t count, std::int64_t width,
                                           std::uint64_t seed = 1);
  /// Returns a model with the same values in memory of its own.
  [[nodiscard]] TestModel copy() const;
  /// Gives every parameter this type in its chunk.
  TestModel& typed(ScalarType type);
  /// Leaves a parameter without gradients.
  TestModel& freeze(std::size_t param);

  [[nodiscard]] at::Tensor run_layer(std::size_t layer, const at::Tensor& input) const;
  [[nodiscard]] at::Tensor forward(at::Tensor input) const;
  [[nodiscard]] std::vector<ModuleSpec> modules() const;
  [[nodiscard]] std::vector<std::string> names() const;
  /// Returns copies of the parameters' values.
  [[nodiscard]] std::vector<at::Tensor> values() const;
};

/// Returns the loss that the tests differentiate: the mean of the squares.
[[nodiscard]] at::Tensor loss_of(const at::Tensor& output);
/// Returns an input batch from a seed.
[[nodiscard]] at::Tensor batch(std::int64_t width, std::uint64_t seed,
                               at::ScalarType type = at::kFloat, std::int64_t rows = 4);
/// Returns whether two tensors have the same type, shape and bits; NaNs of the same bits are equal.
[[nodiscard]] bool same_bits(const at::Tensor& one, const at::Tensor& other);
/// Expects that each tensor has the bits of the other list's.
void expect_same_bits(const std::vector<at::Tensor>& own, const std::vector<at::Tensor>& expected);

inline constexpr std::uint64_t kRoundingSeed = 5;

/// Plain training with libtorch's own autograd and the update rule over ordinary arrays.
class Reference {
 public:
  /// Takes over `model`, rounded to its types; masters keep the exact values.
  Reference(TestModel model, std::shared_ptr<const UpdateRule> rule, RuleOptions options,
            std::uint64_t rounding_seed = kRoundingSeed);

  [[nodiscard]] const TestModel& model() const noexcept { return model_; }
  /// Runs forward and backward; gradients add up. Returns the loss.
  at::Tensor run(const at::Tensor& input) const;
  /// Updates the trained parameters that have a gradient, and forgets the gradients.
  void step(double grad_scale = 1.0);
  /// Returns the state of the rule with this number, flat.
  [[nodiscard]] const at::Tensor& state(std::size_t param, std::size_t number) const {
    return arrays_[param].states[number];
  }

 private:
  struct Arrays {
    at::Tensor master;
    at::Tensor remainder;
    std::vector<at::Tensor> states;
    std::int64_t steps = 0;
  };
  TestModel model_;
  const std::shared_ptr<const UpdateRule> rule_;
  const RuleOptions options_;
  const std::uint64_t rounding_seed_;
  std::vector<Arrays> arrays_;
};

/// Settings of a TestSession.
struct TestSettings {
  std::shared_ptr<const UpdateRule> rule = adam();
  RuleOptions options = adam_options();
  ScalarType precision = ScalarType::kFloat32;
  Overlap overlap = Overlap::kNone;
  std::size_t chunk_bytes = 1 << 12;
  std::size_t device_bytes = std::size_t{1} << 24;
  std::size_t host_bytes = std::size_t{1} << 26;
  std::string nvme_directory;  ///< empty: there is no NVMe tier
  std::size_t nvme_bytes = std::size_t{1} << 26;
  double nvme_fraction = 0.0;
  bool nvme_holds_activations = false;
  PlacementPolicy policy = PlacementPolicy::kCpu;
  std::uint64_t link_bytes_per_second = 0;
  std::shared_ptr<DeviceBackend> backend;  ///< nullptr: the CPU device
  std::shared_ptr<SharedBudgets>
      budgets;  ///< nullptr: budgets of these bytes, for this session alone
  std::vector<ParamId> valueless;
  std::string name = "TestModel";
};

/// A session over a TestModel, driven by the calls that Python's hooks, optimizer and Booster make.
class TestSession {
 public:
  explicit TestSession(TestModel model, TestSettings settings = {});

  [[nodiscard]] Session& session() const noexcept { return *session_; }
  [[nodiscard]] const std::shared_ptr<Session>& shared() const noexcept { return session_; }
  [[nodiscard]] const TestModel& model() const noexcept { return model_; }
  [[nodiscard]] TestModel& model() noexcept { return model_; }
  [[nodiscard]] const at::Tensor& param(std::size_t i) const { return model_.params[i]; }
  [[nodiscard]] const TestSettings& settings() const noexcept { return settings_; }

  /// Reports the beginning of a module's forward.
  void enter(std::size_t module) const { session_->enter(module_id(module)); }
  /// Reports the end of a module's forward, and watches for its backward.
  void leave(std::size_t module, const at::Tensor& output) const;
  /// Reports that a module's forward has failed.
  void fail(std::size_t module) const;
  /// Runs the model's forward between module events. `around` is called with the number of each
  /// layer before it runs.
  at::Tensor forward(const at::Tensor& input,
                     const std::function<void(std::size_t)>& around = {}) const;
  /// Runs forward and backward. Returns the loss.
  at::Tensor run(const at::Tensor& input, double loss_scale = 1.0) const;
  /// Closes the gradients of a step, within a turn.
  [[nodiscard]] GradientSummary collect(bool with_norm = true) const;
  /// Runs one optimizer step over all parameters, and forgets the gradients.
  GradientSummary step(double grad_scale = 1.0) const;
  /// Runs one optimizer step, and keeps the gradients.
  GradientSummary step_keeping_gradients(double grad_scale = 1.0) const;
  void zero_grad() const;
  /// Returns options that update all trained parameters.
  [[nodiscard]] GroupOptions group_options() const;
  /// Arms Overlap::kBackward for the coming backward.
  void arm() const { session_->arm_updates(group_options()); }

  /// Returns copies of the parameters, after updates.
  [[nodiscard]] std::vector<at::Tensor> values() const;
  [[nodiscard]] ChunkId chunk_of(std::size_t param) const {
    return session_->layout().place(param_id(param)).chunk;
  }
  [[nodiscard]] std::size_t device_used() const {
    return session_->memory().device_tier()->ledger().used();
  }
  void end() { session_.reset(); }

 private:
  TestModel model_;
  const TestSettings settings_;
  std::shared_ptr<Session> session_;
};

/// Makes the options of a session as TestSession does.
[[nodiscard]] SessionOptions session_options(const TestSettings& settings);
/// Creates a session over `model`, without first values of the states.
[[nodiscard]] std::shared_ptr<Session> create_session(const TestModel& model,
                                                      const TestSettings& settings);

}  // namespace castor::testing
