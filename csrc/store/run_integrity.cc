#include "store/run_integrity.h"

#include "core/error.h"

namespace castor {
namespace {

void note(std::string& reason, const std::string& why) {
  if (reason.empty()) {  // the first one is the cause
    reason = why;
  }
}

}  // namespace

void RunIntegrity::broke(const std::string& why) {
  {
    const MutexLock lock(mutex_);
    note(weights_lost_, why);
    note(states_lost_, why);
  }
  if (then_) {
    then_();
  }
}

void RunIntegrity::loading(RunLoad load) {
  const MutexLock lock(mutex_);
  if (load.weights != LoadedWeights::kNone) {
    note(weights_lost_, "a load of the weights did not come to its end");
  }
  if (load.states) {
    note(states_lost_, "a load of the optimizer states did not come to its end");
  }
}

void RunIntegrity::loaded(RunLoad load) {
  const MutexLock lock(mutex_);
  if (load.weights != LoadedWeights::kNone) {
    weights_lost_.clear();
  }
  if (load.states) {
    states_lost_.clear();
  }
}

bool RunIntegrity::consistent() const {
  const MutexLock lock(mutex_);
  return weights_lost_.empty() && states_lost_.empty();
}

void RunIntegrity::check() const {
  const MutexLock lock(mutex_);
  if (weights_lost_.empty() && states_lost_.empty()) {
    return;
  }
  const std::string what = weights_lost_.empty()  ? "The optimizer states belong"
                           : states_lost_.empty() ? "The weights belong"
                                                  : "Weights and optimizer states belong";
  throw UsageError("this run cannot go on, and cannot be saved: " +
                   (weights_lost_.empty() ? states_lost_ : weights_lost_) + ". " + what +
                   " to no single step; load the last checkpoint, with model and optimizer "
                   "(booster.load)");
}

}  // namespace castor
