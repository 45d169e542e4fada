#include "c10d/heartbeats.h"

#include <pthread.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "c10d/group_backend.h"
#include "core/error.h"
#include "core/mutex.h"

namespace castor {
namespace {

constexpr const char* kHeartbeatPrefix = "castor/heartbeats";
constexpr std::chrono::seconds kSecondsToEnd{1};
/// More has passed where this process was stopped, or its machine slept.
constexpr std::chrono::milliseconds kLongestLook{2000};
/// The store's own limit, which counts nowhere: a silent store is noticed by RankHealth.
constexpr std::chrono::hours kStoreTimeout{24};

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

struct Heartbeats::Thread {
  Thread(c10::intrusive_ptr<c10d::Store> own, std::shared_ptr<RankHealth> health)
      : store(std::move(own)), ranks(std::move(health)), there(ranks->size(), false) {}

  void run() noexcept {
    static_cast<void>(::pthread_setname_np(::pthread_self(), "castor-beats"));
    try {
      bool going_on = true;
      while (going_on) {
        going_on = ranks->await_beat();
        publish_and_read(going_on);
      }
    } catch (const std::exception&) {
      ranks->end_records();  // the process that keeps the store has ended
    }
    const MutexLock lock(mutex);
    over = true;
    ended.notify_all();
  }

  void publish_and_read(bool going_on) {
    const std::string own = std::to_string(ranks->rank());
    store->set(own, bytes_of(ranks->beat()));
    if (!going_on) {
      return;
    }
    std::vector<std::size_t> heard;
    std::vector<std::string> keys;
    for (std::size_t rank = 0; rank < there.size(); ++rank) {
      const std::string key = std::to_string(rank);
      there[rank] = there[rank] || (rank != ranks->rank() && store->check({key}));
      if (there[rank]) {
        heard.push_back(rank);
        keys.push_back(key);
      }
    }
    std::vector<std::vector<std::uint8_t>> records;
    if (store->hasExtendedApi() && !keys.empty()) {
      records = store->multiGet(keys);
    } else {
      for (const std::string& key : keys) {
        records.push_back(store->get(key));
      }
    }
    for (std::size_t i = 0; i < heard.size(); ++i) {
      ranks->hear(heard[i], {reinterpret_cast<const char*>(records[i].data()), records[i].size()});
    }
    ranks->end_round();
  }

  const c10::intrusive_ptr<c10d::Store> store;
  const std::shared_ptr<RankHealth> ranks;
  std::vector<bool> there;  // of the thread: the rank has published a record
  Mutex mutex;
  std::condition_variable ended;
  bool over CASTOR_GUARDED_BY(mutex) = false;
};

namespace {

c10::intrusive_ptr<c10d::Store> own_connection(const c10d::ProcessGroup& group) {
  try {
    const c10::intrusive_ptr<c10d::Store> shared = group.getStore();
    if (!shared) {
      throw Error("this process group has no store");
    }
    auto store = c10::make_intrusive<c10d::PrefixStore>(kHeartbeatPrefix, shared->clone());
    store->setTimeout(kStoreTimeout);
    return store;
  } catch (const std::exception& error) {
    throw Error(
        "the store of torch.distributed gives no second connection, over which ranks see "
        "that the others are there: " +
        without_places(error));
  }
}

std::shared_ptr<RankHealth> health_of(const c10d::ProcessGroup& group,
                                      const Heartbeats::Options& options) {
  return std::make_shared<RankHealth>(static_cast<std::size_t>(group.getRank()),
                                      static_cast<std::size_t>(group.getSize()), options.host,
                                      ::getpid(), options.interval, options.silence);
}

}  // namespace

Heartbeats::Heartbeats(const Options& options, std::shared_ptr<RankWaits> waits)
    : waits_(std::move(waits)),
      health_(health_of(*process_group(options.group), options)),
      thread_(std::make_shared<Thread>(own_connection(*process_group(options.group)), health_)) {
  std::thread([thread = thread_] { thread->run(); }).detach();
  waits_->set_health(health_);
}

Heartbeats::~Heartbeats() { end(); }

void Heartbeats::look() {
  if (ended_ || ::getpid() != health_->process()) {
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(now - looked_);
  looked_ = now;
  health_->look(std::min(passed, kLongestLook));
  waits_->set_lost(health_->find_lost().why);
}

void Heartbeats::end() noexcept {
  if (::getpid() != health_->process() || ended_.exchange(true)) {
    return;
  }
  if (waits_->health() == health_) {
    waits_->set_health(nullptr);
  }
  health_->end();
  MutexLock lock(thread_->mutex);
  thread_->ended.wait_for(lock.native(), kSecondsToEnd,
                          [&]() CASTOR_REQUIRES(thread_->mutex) { return thread_->over; });
}

}  // namespace castor
