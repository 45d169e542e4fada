#include "torch/step_recorder.h"

#include <torch/csrc/autograd/function.h>

#include <utility>

#include "torch/step_hooks.h"

namespace castor {

std::shared_ptr<StepRecorder> StepRecorder::create(ChunkLayout layout,
                                                   std::vector<at::Tensor> params, Tell tell) {
  const std::shared_ptr<StepRecorder> recorder(
      new StepRecorder(std::move(layout), std::move(params), std::move(tell)));
  for (std::size_t i = 0; i < recorder->params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    if (recorder->layout_.param(param).trainable) {
      recorder->accumulators_.push_back(watch_gradient(recorder, param, recorder->params_[i]));
    }
  }
  return recorder;
}

StepRecorder::StepRecorder(ChunkLayout layout, std::vector<at::Tensor> params, Tell tell)
    : layout_(std::move(layout)),
      params_(std::move(params)),
      tell_(std::move(tell)),
      gradients_(layout_) {}

void StepRecorder::enter(ModuleId module) {
  tell_(EventKind::kForwardEnter, static_cast<std::uint32_t>(module));
}

void StepRecorder::exit(ModuleId module) {
  tell_(EventKind::kForwardExit, static_cast<std::uint32_t>(module));
}

void StepRecorder::enter_backward(ModuleId module, PassTurn::Origin /*origin*/) {
  tell_(EventKind::kBackwardEnter, static_cast<std::uint32_t>(module));
}

void StepRecorder::gradient_arrived(ParamId param, const at::Tensor& /*incoming*/) {
  at::Tensor& grad = params_[index(param)].mutable_grad();
  if (!grad.defined()) {
    return;
  }
  grad.reset();
  if (gradients_.add(param)) {
    tell_(EventKind::kGradReady, static_cast<std::uint32_t>(layout_.place(param).chunk));
  }
}

}  // namespace castor
