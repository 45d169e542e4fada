// Session: what Python, operators and checkpoints read, write and load of it between the passes.
#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "torch/session.h"

namespace castor {
void Session::check_consistent() {
  check_process();
  updates_.check_consistent();
}

void Session::barrier_to_load() {
  check_process();
  if (SessionRanks* const ranks = updates_.ranks()) {
    ranks->check_there();
    ranks->begin_load();
  }
}

void Session::begin_load(RunLoad load) {
  const Turn turn(shared_from_this(), PassTurn::Section::kPlain, "a load");
  memory_.device().follow_stream();
  updates_.begin_load(load);
  passes_->turn().step_is_over();
  gradients_.begin_step();
  param_memory_.take_up_all();
  updates_.loading(load);
  note_loaded_rows();
}

void Session::end_load(RunLoad load) {
  note_loaded_rows();
  updates_.loaded(load);
}

// A load may write host storage without an operator.
void Session::note_loaded_rows() {
  for (const ChunkSpec& chunk : layout().chunks()) {
    if (chunk.by_row) {
      storages_.note_write(chunk.params.front());
    }
  }
}

// A failure comes out once as what it is; from then on what it did to the run is said instead.
void Session::settle() {
  const Turn turn(shared_from_this(), PassTurn::Section::kPlain, "a read of the weights");
  if (consistent()) {
    await_updates();
  }
  memory_.device().await();
  check_consistent();
  param_memory_.take_up_given();
}

void Session::settle(ParamId param) {
  check_process();
  gate_->pass(index(layout().place(param).chunk));
  param_memory_.take_up(param);
  memory_.device().await();
}

void Session::move_to_host() {
  const Turn turn(shared_from_this(), PassTurn::Section::kPlain, "a read of the weights");
  updates_.updater().check_none_updated("the weights are read");
  settle();
  param_memory_.take_up_all();
  runtime().move_to_host();
  memory_.device().await();
}

std::vector<ChunkId> Session::begin_reads() {
  const Turn turn(shared_from_this(), PassTurn::Section::kPlain, "a save");
  move_to_host();
  reads().begin();
  std::vector<ChunkId> not_held;
  for (std::size_t i = 0; i < memory_.num_chunks(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    gate_->share(i);
    if (aliased_values(chunk) || updates_.states().on_device(chunk)) {
      not_held.push_back(chunk);
    }
  }
  return not_held;
}

std::shared_ptr<void> Session::visit_groups(std::span<const TensorGate::Use> uses) {
  check_process();
  return updates_.visit(shared_from_this(), uses);
}

std::shared_ptr<void> Session::visit(ParamId param, bool writes) {
  const ChunkId chunk = layout().place(param).chunk;
  settle(param);
  if (!chunks_.stored(chunk)) {
    return nullptr;
  }
  const TensorGate::Use use{.group = index(chunk), .writes = writes};
  return visit_groups(std::span(&use, 1));
}

std::optional<at::Tensor> Session::host_storage(ParamId param) {
  const ParamPlace place = layout().place(param);
  if (!memory_.device().computes_by_itself() || updates_.states().on_device(place.chunk) ||
      chunks_.stored(place.chunk)) {
    return std::nullopt;
  }
  settle(param);
  const ParamGeometry geometry = geometry_of(params_[index(param)].local);
  return at::for_blob(updates_.states().element(param, PayloadKind::kParam), geometry.sizes)
      .strides(geometry.strides)
      .options(at::TensorOptions().dtype(to_torch(layout().param(param).type)))
      .make_tensor();
}

bool Session::begin_rows(std::span<const ChunkId> chunks) {
  check_process();
  return !at::GradMode::is_enabled() && ready_on_host(chunks) && runtime().begin_rows(chunks);
}

bool Session::begin_rows_of_step(std::span<const ChunkId> chunks) {
  check_process();
  return ready_on_host(chunks) && runtime().begin_rows_of_step(chunks);
}

bool Session::ready_on_host(std::span<const ChunkId> chunks) {
  if (!passes_->mine()) {
    return false;
  }
  memory_.device().follow_stream();
  for (const ChunkId chunk : chunks) {
    if (chunks_.stored(chunk) || chunks_.absent_gradients(chunk)) {
      return false;
    }
    gate_->pass(index(chunk));
    for (const ParamId param : layout().chunk(chunk).params) {
      param_memory_.take_up(param);
    }
  }
  return true;
}

std::string Session::content_of(const void* storage) {
  const auto is = [storage](const c10::Storage& own) {
    return own && own.unsafeGetStorageImpl() == storage;
  };
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const std::string named = "parameter '" + layout().param(param).name + "'";
    if (is(storages_.storage(param))) {
      return named;
    }
    if (is(gradients_.storage(param))) {
      return "the gradient of " + named;
    }
    if (state_views_.hold(param, storage)) {
      return "an optimizer state of " + named;
    }
  }
  return "";
}

const std::vector<at::Tensor>& Session::states(ParamId param) {
  return state_views_.of(param, optimizer_state_, *gate_, index(layout().place(param).chunk));
}

}  // namespace castor
