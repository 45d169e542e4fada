// One suite for every executor. Under ThreadSanitizer TBB is left out: it is not instrumented, and
// TSan reports false races inside it.

#include "core/executor.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <ctime>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "parallel/cores.h"
#include "parallel/tbb_executor.h"
#include "parallel/thread_executor.h"

namespace castor {
namespace {

struct ExecutorKind {
  std::string name;
  std::unique_ptr<Executor> (*make)(std::size_t num_threads);
  std::size_t num_threads;
};

template <typename T>
std::unique_ptr<Executor> make(std::size_t num_threads) {
  return std::make_unique<T>(num_threads);
}

std::vector<ExecutorKind> every_executor() {
  std::vector<ExecutorKind> kinds;
  for (const std::size_t num_threads : {1, 2, 5}) {
    const std::string suffix = std::to_string(num_threads);
    kinds.push_back({"Thread" + suffix, make<ThreadExecutor>, num_threads});
#if !defined(__SANITIZE_THREAD__)
    kinds.push_back({"Tbb" + suffix, make<TbbExecutor>, num_threads});
#endif
  }
  return kinds;
}

class ExecutorTest : public ::testing::TestWithParam<ExecutorKind> {
 protected:
  const std::unique_ptr<Executor> executor_ = GetParam().make(GetParam().num_threads);
};

TEST_P(ExecutorTest, CallsEveryIndexOnceAndPublishesItsWrites) {
  for (const std::size_t count : {0, 1, 2, 3, 7, 64, 1000, 20000}) {
    std::vector<int> calls(count, 0);  // plain ints: a lost or doubled call, or a race, shows
    executor_->parallel_for(count, [&](std::size_t i) { ++calls[i]; });
    EXPECT_EQ(calls, std::vector<int>(count, 1));
  }
}

TEST_P(ExecutorTest, KnowsItsNumberOfThreads) {
  EXPECT_EQ(executor_->num_threads(), GetParam().num_threads);
}

TEST_P(ExecutorTest, NeverRunsMoreBodiesAtOnceThanItHasThreads) {
  std::atomic<std::size_t> running{0};
  std::atomic<std::size_t> num_over{0};
  executor_->parallel_for(2000, [&](std::size_t) {
    if (running.fetch_add(1) + 1 > GetParam().num_threads) {
      ++num_over;
    }
    running.fetch_sub(1);
  });
  EXPECT_EQ(num_over, 0U);
}

TEST_P(ExecutorTest, RethrowsAFailureAtAnyCallAndStaysUsable) {
  for (const std::size_t failing : {0, 1, 50, 98, 99}) {
    std::atomic<std::size_t> num_calls{0};
    try {
      executor_->parallel_for(100, [&](std::size_t i) {
        ++num_calls;
        if (i == failing) {
          throw std::runtime_error("body " + std::to_string(i));
        }
      });
      ADD_FAILURE() << "the failure of body " << failing << " was lost";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "body " + std::to_string(failing));
    }
    EXPECT_GE(num_calls, 1U);
    EXPECT_LE(num_calls, 100U);
    std::atomic<std::size_t> num_after{0};
    executor_->parallel_for(100, [&](std::size_t) { ++num_after; });
    EXPECT_EQ(num_after, 100U);
  }
}

TEST_P(ExecutorTest, RethrowsOneFailureWhenAllFail) {
  EXPECT_THROW(
      executor_->parallel_for(50, [](std::size_t) { throw InvalidArgument("every body fails"); }),
      InvalidArgument);
}

TEST_P(ExecutorTest, NothingRunsAfterTheReturn) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> returned{false};
    std::atomic<int> num_late{0};
    try {
      executor_->parallel_for(16, [&](std::size_t i) {
        if (i == 3) {
          throw std::runtime_error("stop");
        }
        num_late += returned ? 1 : 0;
      });
      ADD_FAILURE() << "the failure was lost";
    } catch (const std::runtime_error&) {
    }
    returned = true;
    EXPECT_EQ(num_late, 0);
  }
}

TEST_P(ExecutorTest, ReturnsOnlyWhenTheSlowestBodyHasEnded) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<std::size_t> num_ended{0};
  executor_->parallel_for(8, [&](std::size_t) {
    // Makes the other threads the slow ones; nothing is ordered by it. A caller too early
    // miscounts.
    const bool slow = std::this_thread::get_id() != caller;
    std::this_thread::sleep_for(std::chrono::milliseconds(slow ? 40 : 1));
    ++num_ended;
  });
  EXPECT_EQ(num_ended, 8U);
}

TEST_P(ExecutorTest, ServesSeveralCallersAtOnce) {
  constexpr std::size_t kCallers = 4;
  constexpr std::size_t kRounds = 100;
  constexpr std::size_t kCount = 37;
  std::vector<std::size_t> sums(kCallers, 0);
  std::atomic<std::size_t> num_caught{0};
  {
    std::vector<std::jthread> callers;
    for (std::size_t caller = 0; caller < kCallers; ++caller) {
      callers.emplace_back([&, caller] {
        for (std::size_t round = 0; round < kRounds; ++round) {
          std::vector<std::size_t> values(kCount, 0);
          executor_->parallel_for(kCount, [&](std::size_t i) { values[i] = i; });
          sums[caller] += std::accumulate(values.begin(), values.end(), std::size_t{0});
          try {  // a failure reaches its own caller only
            executor_->parallel_for(kCount, [&](std::size_t i) {
              if (i == caller) {
                throw caller;
              }
            });
          } catch (const std::size_t thrown_by) {
            num_caught += thrown_by == caller ? 1 : 0;
          }
        }
      });
    }
  }
  EXPECT_EQ(sums, std::vector<std::size_t>(kCallers, kRounds * kCount * (kCount - 1) / 2));
  EXPECT_EQ(num_caught, kCallers * kRounds);
}

TEST_P(ExecutorTest, IdleThreadsDoNotSpin) {
  executor_->parallel_for(100, [](std::size_t) {});
  // Time passes here to be measured, not to order anything. TBB's workers spin for a moment first.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 20);
}

TEST_P(ExecutorTest, ZeroThreadsAreRefused) {
  EXPECT_THROW((void)GetParam().make(0), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Every, ExecutorTest, ::testing::ValuesIn(every_executor()),
                         [](const auto& instance) { return instance.param.name; });

TEST(ThreadExecutorTest, AllThreadsWorkOnOneLoop) {
  constexpr std::size_t kThreads = 4;
  ThreadExecutor executor(kThreads);
  std::barrier<> all_here(kThreads);  // passes only if every body runs on a thread of its own
  std::mutex mutex;
  std::set<std::thread::id> ids;
  executor.parallel_for(kThreads, [&](std::size_t) {
    all_here.arrive_and_wait();
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(ids.size(), kThreads);
  EXPECT_TRUE(ids.contains(std::this_thread::get_id()));
}

TEST(ThreadExecutorTest, StartsAndStopsWithoutWork) {
  for (int i = 0; i < 50; ++i) {
    const ThreadExecutor executor(4);
  }
}

TEST(CoresTest, FollowTheAffinityMaskOfTheThread) {
  std::jthread([] {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    ASSERT_EQ(::sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    EXPECT_EQ(num_available_cores(), static_cast<std::size_t>(CPU_COUNT(&allowed)));
    int first = 0;
    while (!CPU_ISSET(first, &allowed)) {
      ++first;
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(num_available_cores(), 1U);
    EXPECT_EQ(ThreadExecutor().num_threads(), 1U);
#if !defined(__SANITIZE_THREAD__)
    EXPECT_EQ(TbbExecutor().num_threads(), 1U);
#endif
  }).join();
}

}  // namespace
}  // namespace castor
