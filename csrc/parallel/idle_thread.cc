#include "parallel/idle_thread.h"

#include <sched.h>
#include <time.h>

#include <ctime>
#include <utility>

namespace castor {
namespace {

thread_local IdleThread* preferred = nullptr;

double thread_seconds() noexcept {
  std::timespec used{};
  static_cast<void>(::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used));
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

}  // namespace

IdleThread::IdleThread() : thread_([this](const std::stop_token& stop) { serve(stop); }) {}

void IdleThread::serve(const std::stop_token& stop) {
  const sched_param none{};
  static_cast<void>(::sched_setscheduler(0, SCHED_IDLE, &none));
  MutexLock lock(mutex_);
  while (given_.wait(lock.native(), stop,
                     [&]() CASTOR_REQUIRES(mutex_) { return work_ != nullptr; })) {
    const std::function<void()>& work = *work_;
    lock.unlock();
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    work_ = nullptr;
    error_ = error;
    seconds_ = thread_seconds();
    done_.notify_one();
  }
}

void IdleThread::run(const std::function<void()>& work) {
  MutexLock lock(mutex_);
  work_ = &work;
  given_.notify_one();
  done_.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex_) { return work_ == nullptr; });
  if (const std::exception_ptr error = std::exchange(error_, nullptr)) {
    std::rethrow_exception(error);
  }
}

double IdleThread::seconds() const {
  const MutexLock lock(mutex_);
  return seconds_;
}

void IdleThread::prefer(IdleThread* thread) noexcept { preferred = thread; }

void where_idle(const std::function<void()>& work) {
  if (preferred == nullptr) {
    work();
  } else {
    preferred->run(work);
  }
}

}  // namespace castor
