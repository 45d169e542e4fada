#include "store/updater.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/error.h"
#include "store/chunk_pins.h"

namespace castor {

Updater::Updater(const Parts& parts, Overlap overlap, std::function<bool(ChunkId)> aliased)
    : parts_(parts),
      overlap_(overlap),
      aliased_(std::move(aliased)),
      updated_(parts.layout.chunks().size(), false) {}

void Updater::check(const GroupOptions& options) const {
  const UpdateRule& rule = parts_.updates.rule();
  if (options.group_of.size() != parts_.layout.params().size()) {
    throw InvalidArgument("group_of has " + std::to_string(options.group_of.size()) +
                          " entries for " + std::to_string(parts_.layout.params().size()) +
                          " parameters");
  }
  check_options(rule, options.groups);
  for (const std::int64_t group : options.group_of) {
    if (group < GroupOptions::kNoGroup ||
        group >= static_cast<std::int64_t>(options.groups.size())) {
      throw InvalidArgument("group_of names group " + std::to_string(group) + " of " +
                            std::to_string(options.groups.size()));
    }
  }
}

void Updater::arm(GroupOptions options) {
  if (overlap_ == Overlap::kBackward) {
    check(options);
    armed_ = std::move(options);
  }
}

void Updater::completed(ChunkId chunk) {
  if (!armed_.groups.empty()) {
    completed_.push_back(chunk);
    update_completed();
  }
}

void Updater::update_completed() {
  std::erase_if(completed_, [this](ChunkId chunk) {
    if (parts_.gradients.in_several_passes(chunk) || aliased_(chunk)) {
      // More may come, or an alias be read, in what is left of backward: step() updates the chunk.
      return true;
    }
    if (!parts_.runtime.retire(chunk)) {
      return false;
    }
    std::vector<ParamUpdate> updates;
    for (const ParamId param : parts_.layout.chunk(chunk).params) {
      if (armed_.has(param)) {  // else no group holds it any more
        updates.push_back(next_update(param, armed_.of(param), 1.0));
      }
    }
    {
      const MutexLock lock(mutex_);
      updated_[index(chunk)] = true;
      any_updated_.store(true, std::memory_order_release);
    }
    submit(chunk, updates);
    return true;
  });
}

void Updater::check_none_updated(const std::string& what) const {
  const auto num_updated = [this] {
    const MutexLock lock(mutex_);
    return std::count(updated_.begin(), updated_.end(), true);
  }();
  if (num_updated > 0) {
    throw UsageError(what + " after a backward that updated " + std::to_string(num_updated) +
                     " of " + std::to_string(parts_.layout.chunks().size()) +
                     " chunks, and optimizer.step() was not called: with overlap=\"backward\" the "
                     "weights are between two steps then. Call step() after every backward; to "
                     "accumulate gradients use overlap=\"forward\"; after a backward that failed, "
                     "load a checkpoint");
  }
}

void Updater::check_not_updated(ModuleId module) const {
  for (const ChunkId chunk : parts_.layout.chunks_of(module)) {
    if (updated(chunk)) {
      check_none_updated("module '" + parts_.layout.module(module).name + "' ran");
    }
  }
}

void Updater::end_step() {
  {
    const MutexLock lock(mutex_);
    std::fill(updated_.begin(), updated_.end(), false);
    any_updated_.store(false, std::memory_order_release);
  }
  armed_ = {};
  completed_.clear();
}

// In the order of the chunks, which is the order in which the next forward needs them.
void Updater::step(const GroupOptions& options, double grad_scale) {
  parts_.device.follow_stream();
  check(options);
  std::vector<std::vector<ParamUpdate>> updates(parts_.layout.chunks().size());
  for (std::size_t i = 0; i < parts_.layout.params().size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const ChunkId chunk = parts_.layout.place(param).chunk;
    if (updated(chunk)) {
      check_used_gradient(param, options);
    } else if (options.has(param) && parts_.gradients.present(param)) {
      updates[index(chunk)].push_back(next_update(param, options.of(param), grad_scale));
    }
  }
  if (parts_.queue == nullptr) {
    run_now(updates);
  }
  for (std::size_t i = 0; i < updates.size() && parts_.queue != nullptr; ++i) {
    if (!updates[i].empty()) {
      submit(ChunkId{static_cast<std::uint32_t>(i)}, updates[i]);
    }
  }
  end_step();
}

// The update is over or under way: it has to be the one that step() would make now.
void Updater::check_used_gradient(ParamId param, const GroupOptions& options) const {
  const auto refuse = [&](const std::string& what) {
    throw UsageError(what +
                     " between backward and step(), but overlap=\"backward\" has updated "
                     "parameter '" +
                     parts_.layout.param(param).name +
                     "' in backward already; change it before the forward, or use "
                     "overlap=\"forward\"");
  };
  if (options.has(param) != armed_.has(param)) {
    refuse(armed_.has(param) ? "a parameter was taken out of its group"
                             : "a parameter was given a group");
  }
  if (!options.has(param)) {
    return;
  }
  if (!parts_.gradients.present(param) || !parts_.gradients.untouched(param)) {
    refuse("its gradient was changed");
  }
  if (options.of(param) != armed_.of(param)) {
    refuse("an option of its parameter group was changed");
  }
}

ParamUpdate Updater::next_update(ParamId param, const RuleOptions& options,
                                 double grad_scale) const {
  const auto taken = static_cast<std::int64_t>(parts_.steps(param));
  return parts_.updates.update_of(param, options, taken + 1, grad_scale);
}

// The updates are made, or under way.
void Updater::count(std::span<const ParamUpdate> updates) {
  for (const ParamUpdate& update : updates) {
    float& taken = parts_.steps(update.param);
    taken = static_cast<float>(static_cast<std::int64_t>(taken) + (update.steps_states ? 1 : 0));
    parts_.replaced(update.param);
  }
}

void Updater::run_now(std::span<const std::vector<ParamUpdate>> updates) {
  std::vector<ChunkId> chunks;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    if (!updates[i].empty()) {
      chunks.push_back(ChunkId{static_cast<std::uint32_t>(i)});
      parts_.updates.begin(chunks.back());
      parts_.runtime.drop_copy(chunks.back());
    }
  }
  const ChunkPins held(parts_.runtime, parts_.device, chunks);
  std::size_t num_begun = 0;
  try {
    parts_.updates.run_all(updates, num_begun);
  } catch (const std::exception& error) {
    if (num_begun > 0 || parts_.updates.collective()) {  // others may have changed theirs
      parts_.integrity.broke("optimizer.step() failed when it had changed " +
                             std::to_string(num_begun) + " of " + std::to_string(updates.size()) +
                             " chunks (" + error.what() + ")");
    }
    throw;
  }
  for (const auto& of_chunk : updates) {
    count(of_chunk);
  }
}

void Updater::submit(ChunkId chunk, const std::vector<ParamUpdate>& updates) {
  // Other chunks may be in the next step already, so that a failure leaves a mixture.
  const auto attempt = [this, chunk](const auto& work) {
    try {
      work();
    } catch (const std::exception& error) {
      parts_.integrity.broke("the optimizer's update of chunk " + std::to_string(index(chunk)) +
                             " failed (" + error.what() + ")");
      throw;
    }
  };
  // What is on the device stays there until it is updated, or until the queue has it.
  const ChunkPins held(parts_.runtime, parts_.device, std::span(&chunk, 1));
  if (parts_.places.on_device(chunk)) {
    // Behind what the device has been given, and before what it will be: nobody has to wait.
    attempt([&] { parts_.updates.run(chunk, updates); });
    count(updates);
    if (parts_.updates.collective()) {
      // Other ranks may have it on the host, and update it there in its turn.
      parts_.gate.close(index(chunk));
      attempt([&] {
        parts_.queue->submit(chunk, [this, attempt, chunk](std::span<const ChunkId> /*next*/) {
          attempt([&] { parts_.updates.gather(chunk); });
        });
      });
      await_aliased(chunk);
    }
    return;
  }
  parts_.updates.begin(chunk);
  parts_.gate.close(index(chunk));
  parts_.gate.close(gradient_group(parts_.layout, chunk));
  parts_.runtime.drop_copy(chunk);
  const CopyTicket gradients = parts_.gradients.last_copy_of(chunk);
  // The device may have written gradients where they are, beside those that were copied.
  const std::shared_ptr<ComputeFence> fence = parts_.device.fence();
  attempt([&] {
    parts_.queue->submit(
        chunk, [this, attempt, chunk, gradients, fence, updates](std::span<const ChunkId> next) {
          attempt([&] {
            std::vector<ChunkId> ahead = {chunk};
            ahead.insert(ahead.end(), next.begin(), next.end());
            parts_.places.announce(ahead);
            parts_.copies.wait(gradients);
            fence->wait();
            parts_.updates.run(chunk, updates);
          });
        });
  });
  count(updates);
  await_aliased(chunk);
}

void Updater::await_aliased(ChunkId chunk) {
  if (aliased_(chunk)) {
    parts_.queue->wait(chunk);  // nothing would hold its readers back
    parts_.gate.open(index(chunk));
    parts_.gate.open(gradient_group(parts_.layout, chunk));
  }
}

void Updater::wait(ChunkId chunk) {
  if (parts_.queue != nullptr) {
    parts_.queue->wait(chunk);
  }
}

void Updater::wait_for_all() {
  if (parts_.queue != nullptr) {
    parts_.queue->drain();
  }
  parts_.gate.pass_all();
  try {
    parts_.places.flush();
  } catch (const std::exception& error) {
    parts_.integrity.broke(std::string("an optimizer state could not be written (") + error.what() +
                           ")");
    throw;
  }
}

void Updater::abandon() {
  end_step();
  if (parts_.queue != nullptr) {
    parts_.queue->abandon();
  }
}

}  // namespace castor
