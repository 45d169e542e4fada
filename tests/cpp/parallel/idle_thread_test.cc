#include "parallel/idle_thread.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <thread>

#include "core/error.h"

namespace castor {
namespace {

TEST(IdleThreadTest, WorkRunsOnAThreadThatTakesIdleCores) {
  IdleThread idle;
  for (int i = 0; i < 100; ++i) {
    std::thread::id worker;
    int policy = -1;
    idle.run([&] {
      worker = std::this_thread::get_id();
      policy = ::sched_getscheduler(0);
    });
    EXPECT_NE(worker, std::this_thread::get_id());
    EXPECT_EQ(policy, SCHED_IDLE);
  }
  EXPECT_NE(::sched_getscheduler(0), SCHED_IDLE);
}

TEST(IdleThreadTest, WhatWorkThrowsIsRethrownOnce) {
  IdleThread idle;
  EXPECT_THROW(idle.run([] { throw Error("work"); }), Error);
  idle.run([] {});
}

TEST(IdleThreadTest, AThreadPrefersOneUntilItIsToldOtherwise) {
  IdleThread idle;
  const auto where = [] {
    std::thread::id worker;
    where_idle([&] { worker = std::this_thread::get_id(); });
    return worker;
  };
  const std::thread::id own = std::this_thread::get_id();
  EXPECT_EQ(where(), own);
  IdleThread::prefer(&idle);
  EXPECT_NE(where(), own);
  std::jthread([&] { EXPECT_EQ(where(), std::this_thread::get_id()); });
  IdleThread::prefer(nullptr);
  EXPECT_EQ(where(), own);
}

TEST(IdleThreadTest, ItsProcessorTimeIsKnown) {
  IdleThread idle;
  EXPECT_EQ(idle.seconds(), 0.0);
  idle.run([] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (std::chrono::steady_clock::now() < end) {
    }
  });
  EXPECT_GT(idle.seconds(), 0.0);
  EXPECT_LT(idle.seconds(), 10.0);
}

}  // namespace
}  // namespace castor
