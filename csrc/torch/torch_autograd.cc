#include "torch/torch_autograd.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <pthread.h>

#include <array>
#include <string_view>
#include <utility>

#include "torch/torch_error.h"

namespace castor {
namespace {

class TorchAutograd final : public Autograd {
 public:
  [[nodiscard]] PassTurn::Caller caller() const override {
    thread_local const bool shared = [] {
      std::array<char, 16> name{};
      return ::pthread_getname_np(::pthread_self(), name.data(), name.size()) == 0 &&
             std::string_view(name.data()).starts_with("pt_autograd");
    }();
    return {.shared = shared, .task = ::torch::autograd::get_current_graph_task_id()};
  }
  [[nodiscard]] bool records() const override { return at::GradMode::is_enabled(); }
  void at_end(std::function<void()> reached) const override {
    ::torch::autograd::Engine::get_default_engine().queue_callback(
        [reached = std::move(reached)] { for_torch(reached); });
  }
};

}  // namespace

std::unique_ptr<Autograd> torch_autograd() { return std::make_unique<TorchAutograd>(); }

}  // namespace castor
