#include "torch/test_session.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>

#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "io/scoped_faults.h"
#include "optim/convert.h"
#include "optim/rule_of_type.h"
#include "optim/state_convert.h"
#include "parallel/thread_executor.h"
#include "torch/chunk_storages.h"
#include "torch/cpu_backend.h"
#include "torch/step_hooks.h"

namespace castor::testing {
namespace {

at::Tensor random(at::IntArrayRef sizes, std::uint64_t seed) {
  at::manual_seed(seed);
  return at::randn(sizes) * 0.3;
}

Executor& executor() {
  static ThreadExecutor one(1);
  return one;
}

at::ScalarType to_torch_state(StateType type) {
  return type == StateType::kFloat32    ? at::kFloat
         : type == StateType::kBFloat16 ? at::kBFloat16
                                        : at::kByte;
}

}  // namespace

TestModel TestModel::layers_of(std::size_t count, std::int64_t width, std::uint64_t seed) {
  TestModel model;
  for (std::size_t i = 0; i < count; ++i) {
    model.params.push_back(random({width, width}, 2 * i + 100 * seed).set_requires_grad(true));
    model.params.push_back(random({width}, 2 * i + 100 * seed + 1).set_requires_grad(true));
    model.layers.push_back({.weight = 2 * i, .bias = 2 * i + 1});
  }
  model.trained.assign(model.params.size(), true);
  model.types.resize(model.params.size());
  return model;
}

TestModel TestModel::copy() const {
  TestModel other = *this;
  for (at::Tensor& param : other.params) {
    param = param.detach().clone().set_requires_grad(param.requires_grad());
  }
  return other;
}

TestModel& TestModel::typed(ScalarType type) {
  types.assign(params.size(), type);
  return *this;
}

TestModel& TestModel::freeze(std::size_t param) {
  params[param].set_requires_grad(false);
  trained[param] = false;
  return *this;
}

at::Tensor TestModel::run_layer(std::size_t layer, const at::Tensor& input) const {
  const Layer& own = layers[layer];
  return at::linear(input, params[own.weight],
                    own.bias ? std::optional(params[*own.bias]) : std::nullopt)
      .tanh();
}

at::Tensor TestModel::forward(at::Tensor input) const {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    input = run_layer(i, input);
  }
  return input;
}

std::vector<ModuleSpec> TestModel::modules() const {
  std::vector<ModuleSpec> modules{{.name = "", .params = {}, .parent = std::nullopt}};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    ModuleSpec spec{.name = "layer" + std::to_string(i),
                    .params = {param_id(layers[i].weight)},
                    .parent = std::nullopt};
    if (layers[i].bias) {
      spec.params.push_back(param_id(*layers[i].bias));
    }
    modules.push_back(std::move(spec));
  }
  return modules;
}

std::vector<std::string> TestModel::names() const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < params.size(); ++i) {
    names.push_back("p" + std::to_string(i));
  }
  return names;
}

std::vector<at::Tensor> TestModel::values() const {
  std::vector<at::Tensor> values;
  for (const at::Tensor& param : params) {
    values.push_back(param.detach().clone());
  }
  return values;
}

at::Tensor loss_of(const at::Tensor& output) { return output.to(at::kFloat).square().mean(); }

at::Tensor batch(std::int64_t width, std::uint64_t seed, at::ScalarType type, std::int64_t rows) {
  return random({rows, width}, 7000 + seed).to(type);
}

bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) {
    return false;
  }
  const at::Tensor left = one.detach().contiguous();
  const at::Tensor right = other.detach().contiguous();
  return left.nbytes() == 0 ||
         std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

void expect_same_bits(const std::vector<at::Tensor>& own, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(own.size(), expected.size());
  for (std::size_t i = 0; i < own.size(); ++i) {
    EXPECT_TRUE(same_bits(own[i], expected[i]))
        << "tensor " << i << ": " << toString(own[i].scalar_type()) << own[i].sizes() << " and "
        << toString(expected[i].scalar_type()) << expected[i].sizes() << ", greatest difference "
        << (own[i].sizes() == expected[i].sizes()
                ? (own[i].detach().to(at::kFloat) - expected[i].detach().to(at::kFloat))
                      .abs()
                      .max()
                      .item<float>()
                : -1.0F);
  }
}

Reference::Reference(TestModel model, std::shared_ptr<const UpdateRule> rule, RuleOptions options,
                     std::uint64_t rounding_seed)
    : model_(std::move(model)),
      rule_(std::move(rule)),
      options_(options),
      rounding_seed_(rounding_seed) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < model_.params.size(); ++i) {
    at::Tensor& param = model_.params[i];
    const at::Tensor exact = param.detach().to(at::kFloat).clone();
    Arrays& arrays = arrays_.emplace_back();
    if (model_.types[i]) {
      const at::Tensor rounded = at::empty(param.sizes(), to_torch(*model_.types[i]));
      if (*model_.types[i] == ScalarType::kFloat32) {
        rounded.copy_(exact);
      } else {
        master_to_param(nullptr, rounded.mutable_data_ptr(), exact.const_data_ptr<float>(),
                        static_cast<std::size_t>(exact.numel()), *model_.types[i]);
      }
      param = rounded.set_requires_grad(param.requires_grad());
    }
    if (!model_.trained[i] || !rule_) {
      continue;
    }
    const UpdateRule& own = rule_of_type(*rule_, model_.types[i].value_or(ScalarType::kFloat32));
    const auto numel = static_cast<std::size_t>(param.numel());
    if (model_.types[i].value_or(ScalarType::kFloat32) != ScalarType::kFloat32) {
      if (own.splits_masters()) {
        arrays.remainder = at::empty({param.numel()}, at::kShort);
        split_masters(nullptr, arrays.remainder.mutable_data_ptr<std::int16_t>(),
                      exact.const_data_ptr<float>(), numel);
      } else {
        arrays.master = exact;
      }
    }
    for (const StateSpec& spec : own.states()) {
      arrays.states.push_back(
          at::zeros({static_cast<std::int64_t>(spec.bytes(numel) / size_of(spec.type))},
                    to_torch_state(spec.type)));
    }
  }
}

at::Tensor Reference::run(const at::Tensor& input) const {
  const at::Tensor loss = loss_of(model_.forward(input));
  loss.backward();
  return loss.detach();
}

void Reference::step(double grad_scale) {
  for (std::size_t i = 0; i < model_.params.size(); ++i) {
    at::Tensor& param = model_.params[i];
    if (!model_.trained[i] || !param.grad().defined()) {
      continue;
    }
    Arrays& arrays = arrays_[i];
    const ScalarType type = model_.types[i].value_or(ScalarType::kFloat32);
    const at::Tensor grad = param.grad().contiguous();
    ++arrays.steps;
    UpdateSegment segment{.param = param.mutable_data_ptr(),
                          .grad = grad.const_data_ptr(),
                          .type = type,
                          .numel = static_cast<std::size_t>(param.numel()),
                          .first_element = 0,
                          .coefficients = rule_->coefficients(options_, arrays.steps, grad_scale),
                          .rounding = RoundingKey(rounding_seed_, i, arrays.steps)};
    if (arrays.master.defined()) {
      segment.master = arrays.master.mutable_data_ptr<float>();
    }
    if (arrays.remainder.defined()) {
      segment.remainder = arrays.remainder.mutable_data_ptr<std::int16_t>();
    }
    for (std::size_t state = 0; state < arrays.states.size(); ++state) {
      segment.states[state] = arrays.states[state].mutable_data_ptr();
    }
    rule_of_type(*rule_, type).update(executor(), std::span(&segment, 1));
    param.mutable_grad().reset();
  }
}

SessionOptions session_options(const TestSettings& settings) {
  SessionOptions options;
  options.precision = settings.precision;
  options.layout = {.chunk_bytes = settings.chunk_bytes, .world_size = 1};
  options.placement.policy = settings.policy;
  options.runtime.policy = settings.policy;
  options.budgets = settings.budgets
                        ? settings.budgets
                        : std::make_shared<SharedBudgets>(settings.device_bytes,
                                                          settings.host_bytes, settings.nvme_bytes);
  options.name = settings.name;
  options.backend =
      settings.backend ? settings.backend : make_cpu_backend(settings.link_bytes_per_second);
  options.state.rule = settings.rule;
  if (!settings.nvme_directory.empty()) {
    options.state.nvme = NvmeOptions{.directories = {settings.nvme_directory},
                                     .budget_bytes = settings.nvme_bytes,
                                     .engine = IoEngineKind::kThreads,
                                     .replace_engine = ScopedFaults::replace,
                                     .holds_activations = settings.nvme_holds_activations,
                                     .depth = 4};
    options.state.nvme_fraction = settings.nvme_fraction;
  }
  options.overlap = settings.overlap;
  options.num_threads = 1;
  return options;
}

std::shared_ptr<Session> create_session(const TestModel& model, const TestSettings& settings) {
  return Session::create(model.params, model.names(), model.trained, model.types, model.modules(),
                         session_options(settings), settings.valueless);
}

TestSession::TestSession(TestModel model, TestSettings settings)
    : model_(std::move(model)), settings_(std::move(settings)) {
  at::set_num_threads(1);
  session_ = create_session(model_, settings_);
  session_->updates().share_weights();
  session_->settle();
  session_->optimizer_state().zero();
  if (settings_.rule) {
    std::vector<std::uint64_t> streams(model_.params.size());
    std::iota(streams.begin(), streams.end(), 0U);
    session_->updates().chunk_updates().set_rounding(kRoundingSeed, std::move(streams));
  }
}

void TestSession::leave(std::size_t module, const at::Tensor& output) const {
  if (at::GradMode::is_enabled() && !session_->layout().module(module_id(module)).params.empty()) {
    watch_backward(session_, module_id(module), std::span(&output, 1));
  }
  session_->exit(module_id(module));
}

void TestSession::fail(std::size_t module) const {
  session_->exit(module_id(module));
  session_->expect_no_backward();
}

at::Tensor TestSession::forward(const at::Tensor& input,
                                const std::function<void(std::size_t)>& around) const {
  enter(0);
  try {
    at::Tensor values = input;
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      enter(i + 1);
      try {
        if (around) {
          around(i);
        }
        values = model_.run_layer(i, values);
      } catch (...) {
        fail(i + 1);
        throw;
      }
      leave(i + 1, values);
    }
    leave(0, values);
    return values;
  } catch (...) {
    fail(0);
    throw;
  }
}

at::Tensor TestSession::run(const at::Tensor& input, double loss_scale) const {
  const at::Tensor loss = loss_of(forward(input));
  session_->gradients().set_loss_scale(loss_scale);
  (loss_scale == 1.0 ? loss : loss * loss_scale).backward();
  session_->gradients().set_loss_scale(1.0);
  return loss.detach();
}

GradientSummary TestSession::collect(bool with_norm) const {
  const at::NoGradGuard no_grad;
  session_->reduce_gradients(std::nullopt);
  return session_->collect_gradients(with_norm);
}

GradientSummary TestSession::step_keeping_gradients(double grad_scale) const {
  const at::NoGradGuard no_grad;
  const Session::Turn turn(session_, PassTurn::Section::kPlain, "an optimizer.step()");
  GradientSummary summary = collect();
  session_->update(group_options(), grad_scale);
  session_->finish_step();
  return summary;
}

GradientSummary TestSession::step(double grad_scale) const {
  GradientSummary summary = step_keeping_gradients(grad_scale);
  zero_grad();
  return summary;
}

void TestSession::zero_grad() const {
  for (const at::Tensor& param : model_.params) {
    param.mutable_grad().reset();
  }
}

GroupOptions TestSession::group_options() const {
  GroupOptions options{.groups = {settings_.options}, .group_of = {}};
  for (std::size_t i = 0; i < model_.params.size(); ++i) {
    options.group_of.push_back(model_.trained[i] ? 0 : GroupOptions::kNoGroup);
  }
  return options;
}

std::vector<at::Tensor> TestSession::values() const {
  const at::NoGradGuard no_grad;
  return model_.values();
}

}  // namespace castor::testing
