#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "core/error.h"
#include "torch/counting_allocator.h"
#include "torch/session.h"

// The part of Session that updates parameters: in backward, in step, beside what follows.
namespace castor {
namespace {

void check_groups(std::span<const AdamOptions> groups, std::span<const std::int64_t> group_of,
                  std::size_t num_params) {
  check_options(groups);
  if (group_of.size() != num_params) {
    throw InvalidArgument("group_of has " + std::to_string(group_of.size()) + " entries for " +
                          std::to_string(num_params) + " parameters");
  }
  for (const std::int64_t group : group_of) {
    if (group < 0 || static_cast<std::size_t>(group) >= groups.size()) {
      throw InvalidArgument("group_of names group " + std::to_string(group) + " of " +
                            std::to_string(groups.size()));
    }
  }
}

}  // namespace

bool Session::updated(ParamId param) const { return updated_[index(layout_.place(param).chunk)]; }

void Session::arm_updates(std::vector<AdamOptions> groups, std::vector<std::int64_t> group_of) {
  if (overlap_ == Overlap::kBackward) {
    check_groups(groups, group_of, params_.size());
    armed_groups_ = std::move(groups);
    armed_group_of_ = std::move(group_of);
  }
}

void Session::update_completed_chunks() {
  std::erase_if(completed_, [this](ChunkId chunk) {
    if (aliased(chunk)) {
      return true;  // an alias may be read in what is left of backward: step() updates the chunk
    }
    if (!runtime_->retire(chunk)) {
      return false;
    }
    std::vector<ParamUpdate> updates;
    for (const ParamId param : layout_.chunk(chunk).params) {
      const auto group = static_cast<std::size_t>(armed_group_of_[index(param)]);
      updates.push_back(next_update(index(param), armed_groups_[group], 1.0));
    }
    updated_[index(chunk)] = true;
    submit_update(chunk, updates);
    return true;
  });
}

void Session::check_no_update_yet(const std::string& what) const {
  const auto num_updated = std::count(updated_.begin(), updated_.end(), true);
  if (num_updated > 0) {
    throw UsageError(what + " after a backward that updated " + std::to_string(num_updated) +
                     " of " + std::to_string(layout_.chunks().size()) +
                     " chunks, and optimizer.step() was not called: with overlap=\"backward\" the "
                     "weights are between two steps then. Call step() after every backward; to "
                     "accumulate gradients use overlap=\"forward\"; after a backward that failed, "
                     "load a checkpoint");
  }
}

void Session::check_not_updated(ModuleId module) const {
  for (const ChunkId chunk : layout_.chunks_of(module)) {
    if (updated_[index(chunk)]) {
      check_no_update_yet("module '" + layout_.module(module).name + "' ran");
    }
  }
}

bool Session::aliased(ChunkId chunk) const {
  const auto& params = layout_.chunk(chunk).params;
  const at::Tensor& gradient = gradients_[index(params.front())].view;
  return (gradient.defined() && gradient.storage().use_count() > gradient_uses_[index(chunk)]) ||
         std::any_of(params.begin(), params.end(), [this](ParamId param) {
           return storages_->storage(param).use_count() > param_uses_[index(param)] ||
                  state_views_->aliased(param);
         });
}

void Session::forget_updates() {
  std::fill(updated_.begin(), updated_.end(), false);
  armed_groups_.clear();
  completed_.clear();
}

// What was changed in the window is written when its memory is needed: in a forward, in a load.
void Session::note_torn_payloads() {
  if (integrity_.whole() && torn()) {
    integrity_.broke(
        std::string(optimizer_state_->torn() ? "an optimizer state" : "parameters or gradients") +
        " could not be written to NVMe");
  }
}

void Session::check_whole() {
  check_process();
  note_torn_payloads();
  integrity_.check();
}

void Session::begin_load(RunLoad load) {
  own_device_.follow_stream();
  forget_updates();
  if (updates_) {
    updates_->abandon();
  }
  note_torn_payloads();
  if (load.states || !integrity_.whole()) {
    optimizer_state_->discard_stored();
  }
  integrity_.loading(load);
  gate_->pass_all();
  runtime_->send_home();
  if (weights_ && load.weights == LoadedWeights::kAll) {
    weights_->discard_parameters();
  }
}

void Session::end_load(RunLoad load) { integrity_.loaded(load); }

void Session::adam_step(std::span<const AdamOptions> groups, std::span<const std::int64_t> group_of,
                        double grad_scale) {
  own_device_.follow_stream();
  check_groups(groups, group_of, params_.size());
  std::vector<std::vector<ParamUpdate>> updates(layout_.chunks().size());
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const auto group = static_cast<std::size_t>(group_of[i]);
    if (updated(param)) {
      check_used_gradient(i, groups[group]);
    } else if (gradients_[i].present) {
      updates[index(layout_.place(param).chunk)].push_back(
          next_update(i, groups[group], grad_scale));
    }
  }
  update(updates);
  forget_updates();
}

// The update is over or under way: it has to be the one that step() would make now.
void Session::check_used_gradient(std::size_t i, const AdamOptions& options) const {
  const Gradient& gradient = gradients_[i];
  const auto refuse = [&](const std::string& what) {
    throw UsageError(what +
                     " between backward and step(), but overlap=\"backward\" has updated "
                     "parameter '" +
                     layout_.params()[i].name +
                     "' in backward already; change it before the forward, or use "
                     "overlap=\"forward\"");
  };
  if (!gradient.present || gradient.version != version_of(gradient.view)) {
    refuse("its gradient was changed");
  }
  if (options != armed_groups_[static_cast<std::size_t>(armed_group_of_[i])]) {
    refuse("an option of its parameter group was changed");
  }
}

ParamUpdate Session::next_update(std::size_t i, const AdamOptions& options,
                                 double grad_scale) const {
  const auto step = static_cast<std::int64_t>(steps_.const_data_ptr<float>()[i]) + 1;
  return optimizer_state_->update_of(ParamId{static_cast<std::uint32_t>(i)}, options, step,
                                     grad_scale);
}

void Session::count_steps(std::span<const ParamUpdate> updates) {
  for (const ParamUpdate& update : updates) {
    steps_.data_ptr<float>()[index(update.param)] += 1.0f;
    // As torch's in-place update does: a graph that saved the old weights must not be replayed.
    params_[index(update.param)].unsafeGetTensorImpl()->bump_version();
  }
}

// In the order of the chunks, which is the order in which the next forward needs them.
void Session::update(std::span<const std::vector<ParamUpdate>> updates) {
  if (!updates_) {
    update_now(updates);
    return;
  }
  for (std::size_t i = 0; i < updates.size(); ++i) {
    if (!updates[i].empty()) {
      submit_update(ChunkId{static_cast<std::uint32_t>(i)}, updates[i]);
    }
  }
}

void Session::update_now(std::span<const std::vector<ParamUpdate>> updates) {
  std::vector<ChunkId> chunks;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    if (!updates[i].empty()) {
      chunks.push_back(ChunkId{static_cast<std::uint32_t>(i)});
    }
  }
  const auto held = hold_on_device(chunks);
  std::size_t num_begun = 0;
  try {
    optimizer_state_->update_all(updates, num_begun);
  } catch (const std::exception& error) {
    if (num_begun > 0) {
      integrity_.broke("optimizer.step() failed when it had changed " + std::to_string(num_begun) +
                       " of " + std::to_string(updates.size()) + " chunks (" + error.what() + ")");
    }
    throw;
  }
  for (const auto& of_chunk : updates) {
    count_steps(of_chunk);
  }
}

void Session::submit_update(ChunkId chunk, const std::vector<ParamUpdate>& updates) {
  // Other chunks may be in the next step already, so that a failure leaves a mixture.
  const auto attempt = [this, chunk](const auto& work) {
    try {
      work();
    } catch (const std::exception& error) {
      integrity_.broke("the optimizer's update of chunk " + std::to_string(index(chunk)) +
                       " failed (" + error.what() + ")");
      throw;
    }
  };
  if (optimizer_state_->on_device(chunk)) {
    // Behind what the device has been given, and before what it will be: nobody has to wait.
    const auto held = hold_on_device(std::span(&chunk, 1));
    attempt([&] { optimizer_state_->update(chunk, updates); });
    count_steps(updates);
    return;
  }
  gate_->close(index(chunk));
  gate_->close(gradient_group(chunk));
  const CopyTicket gradients =
      gradient_copies_ ? gradient_copies_->last_of(chunk) : CopyTicket::kNone;
  // The device may have written gradients where they are, beside those that were copied.
  const std::shared_ptr<ComputeFence> fence = own_device_.fence();
  attempt([&] {
    updates_->submit(
        chunk, [this, attempt, chunk, gradients, fence, updates](std::span<const ChunkId> next) {
          attempt([&] {
            std::vector<ChunkId> ahead = {chunk};
            ahead.insert(ahead.end(), next.begin(), next.end());
            optimizer_state_->announce(ahead);
            copy_engine_->wait(gradients);
            if (fence) {
              fence->wait();
            }
            optimizer_state_->update(chunk, updates);
          });
        });
  });
  count_steps(updates);
  if (aliased(chunk)) {
    updates_->wait(chunk);  // nothing would hold its readers back
    gate_->open(index(chunk));
    gate_->open(gradient_group(chunk));
  }
}

void Session::finish_step() {
  own_device_.follow_stream();
  runtime_->finish_step();
  account_before_.reset();
  if (charged_account() == charged_) {
    charge_allocations_to(nullptr);
  }
  place_chunks_again();
}

void Session::await_updates() {
  if (updates_) {
    updates_->drain();
  }
  gate_->pass_all();
  try {
    optimizer_state_->flush();
  } catch (const std::exception& error) {
    integrity_.broke(std::string("an optimizer state could not be written (") + error.what() + ")");
    throw;
  }
}

// A failure comes out once as what it is; from then on what it did to the run is said instead.
void Session::settle() {
  check_process();
  if (whole()) {
    await_updates();
  }
  own_device_.await();
  check_whole();
}

void Session::settle(ParamId param) {
  check_process();
  gate_->pass(index(layout_.place(param).chunk));
  own_device_.await();
}

void Session::send_home() {
  check_no_update_yet("the weights are read");
  settle();
  runtime_->send_home();
  own_device_.await();
}

}  // namespace castor
