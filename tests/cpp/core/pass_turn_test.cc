#include "core/pass_turn.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <latch>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"

namespace castor {
namespace {

using Mode = PassTurn::Mode;
using Section = PassTurn::Section;

constexpr std::chrono::milliseconds kSoon{120};

PassTurn::Caller me(PassTurn::Task task = PassTurn::kNoTask) { return {.task = task}; }
PassTurn::Caller of_device(PassTurn::Task task) { return {.shared = true, .task = task}; }

/// Waits shorter while it lives.
class ShortPatience {
 public:
  ShortPatience() : before_(PassTurn::set_patience(kSoon)) {}
  ~ShortPatience() { PassTurn::set_patience(before_); }
  ShortPatience(const ShortPatience&) = delete;
  ShortPatience& operator=(const ShortPatience&) = delete;

 private:
  std::chrono::milliseconds before_;
};

/// What `work` throws on a thread of its own; nullopt: nothing.
template <typename Work>
std::optional<std::string> thrown_elsewhere(const Work& work) {
  std::optional<std::string> message;
  std::jthread([&] {
    try {
      work();
    } catch (const UsageError& error) {
      message = error.what();
    }
  }).join();
  return message;
}

TEST(PassTurnTest, TheOwnersOwnEventsNeverWait) {
  PassTurn turn;
  turn.enter_forward(me(), Mode::kTraining);
  turn.enter_forward(me(), Mode::kInference);              // a hook that calls the model again
  EXPECT_TRUE(turn.join_backward(me(7), {}).task_is_new);  // and differentiates
  EXPECT_FALSE(turn.join_backward(me(7), {}).task_is_new);
  EXPECT_TRUE(turn.join_backward(me(8), {}).nested);
  EXPECT_FALSE(turn.end_task(8));
  EXPECT_TRUE(turn.only_task(7));
  EXPECT_TRUE(turn.end_task(7));
  EXPECT_TRUE(turn.mine(me()));
  turn.end_forward();
  EXPECT_FALSE(turn.mine(me()));
}

TEST(PassTurnTest, PassesOfManyThreadsRunOneAtATime) {
  constexpr int kThreads = 4;
  constexpr int kPasses = 200;
  PassTurn turn;
  int num_passes = 0;  // plain: the turn orders its owners
  std::atomic<int> inside = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        std::minstd_rand random(static_cast<unsigned>(i));
        for (int pass = 0; pass < kPasses; ++pass) {
          const int task = i * kPasses + pass;
          const auto kind = random() % 3;
          const PassTurn::Caller caller = me(kind == 1 ? task : PassTurn::kNoTask);
          switch (kind) {
            case 0: turn.enter_forward(caller, Mode::kInference); break;
            case 1: turn.join_backward(caller, {}); break;
            default: turn.enter_section(caller, Section::kPlain, "a step"); break;
          }
          EXPECT_EQ(inside.fetch_add(1), 0);
          ++num_passes;
          turn.enter_section(caller, Section::kPlain, "a step");  // nested
          turn.end_section(Section::kPlain);
          EXPECT_EQ(inside.fetch_sub(1), 1);
          // Only what began here: the turn is over by then, and the next owner's has begun.
          switch (kind) {
            case 0: turn.end_forward(); break;
            case 1: turn.end_task(task); break;
            default: turn.end_section(Section::kPlain); break;
          }
        }
      });
    }
  }
  EXPECT_EQ(num_passes, kThreads * kPasses);
}

TEST(PassTurnTest, ThoseWhoWaitGoFirstComeFirstServed) {
  PassTurn turn;
  std::vector<int> order;
  std::latch waits(1);
  turn.enter_forward(me(), Mode::kTraining);
  std::jthread other([&] {
    waits.count_down();
    turn.enter_forward(me(), Mode::kInference);
    order.push_back(1);
    turn.end_forward();
  });
  waits.wait();
  while (turn.num_waiting() == 0) {
    std::this_thread::yield();
  }
  turn.end_forward();
  turn.enter_forward(me(), Mode::kTraining);  // behind the one that waits
  order.push_back(2);
  turn.end_forward();
  other.join();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(PassTurnTest, AWaitEndsWithWhatALookThrows) {
  PassTurn turn;
  turn.enter_forward(me(), Mode::kInference);
  PassTurn::look_by([] { throw UsageError("interrupted"); });
  EXPECT_EQ(thrown_elsewhere([&] { turn.enter_forward(me(), Mode::kInference); }), "interrupted");
  PassTurn::look_by([] {});
  EXPECT_EQ(turn.num_waiting(), 0U);
  EXPECT_TRUE(turn.mine(me()));
  turn.end_forward();
  EXPECT_FALSE(thrown_elsewhere([&] { turn.enter_forward(me(), Mode::kInference); }));
}

TEST(PassTurnTest, AWaitThatMayNeverEndIsAnError) {
  const ShortPatience patience;
  PassTurn turn;
  turn.enter_section(me(), Section::kPlain, "an optimizer.step()");
  const auto message = thrown_elsewhere([&] { turn.enter_forward(me(), Mode::kInference); });
  ASSERT_TRUE(message);
  EXPECT_NE(message->find("an optimizer.step() of thread"), std::string::npos) << *message;
  turn.end_section(Section::kPlain);
  EXPECT_FALSE(thrown_elsewhere([&] {  // nothing is left of the one that gave up
    turn.enter_forward(me(), Mode::kInference);
    turn.end_forward();
  }));
}

TEST(PassTurnTest, AnOwnerThatMovesOnIsWaitedFor) {
  const ShortPatience patience;
  PassTurn turn;
  turn.enter_forward(me(), Mode::kInference);
  std::atomic<bool> over = false;
  std::jthread other([&] {
    turn.enter_forward(me(), Mode::kInference);
    over = true;
    turn.end_forward();
  });
  const auto until = std::chrono::steady_clock::now() + 3 * kSoon;
  while (std::chrono::steady_clock::now() < until) {
    turn.enter_forward(me(), Mode::kInference);
    std::this_thread::yield();
  }
  EXPECT_FALSE(over);
  turn.end_forward();
  other.join();
  EXPECT_TRUE(over);
}

TEST(PassTurnTest, TheTurnOfADeadThreadIsOver) {
  PassTurn turn;
  std::jthread([&] { turn.enter_forward(me(), Mode::kTraining); }).join();
  EXPECT_TRUE(turn.enter_forward(me(), Mode::kInference).left_behind);
  turn.end_forward();
  EXPECT_FALSE(turn.enter_forward(me(), Mode::kInference).left_behind);
  turn.end_forward();
}

TEST(PassTurnTest, ADevicesThreadWorksForTheThreadThatCalledBackward) {
  PassTurn turn;
  turn.enter_forward(me(), Mode::kTraining);
  const PassTurn::Origin forward = turn.origin();
  std::jthread([&] {  // a backward pass within the forward
    EXPECT_TRUE(turn.join_backward(of_device(1), forward).task_is_new);
    EXPECT_TRUE(turn.end_task(1));
  })
      .join();
  turn.end_forward();
  std::jthread([&] {
    turn.join_backward(of_device(2), forward);
    EXPECT_FALSE(turn.mine(of_device(3)));
    // Over an older graph of the same thread, in a hook; and over one that was made just now.
    EXPECT_TRUE(turn.join_backward(of_device(3), forward).nested);
    turn.end_task(3);
    turn.enter_forward(of_device(2), Mode::kTraining);
    EXPECT_EQ(turn.origin().thread, forward.thread);
    EXPECT_TRUE(turn.join_backward(of_device(4), turn.origin()).nested);
    turn.end_forward();
    turn.end_task(4);
    turn.end_task(2);
  }).join();
}

TEST(PassTurnTest, ADevicesThreadCannotWaitForItself) {
  PassTurn turn;
  turn.enter_forward(me(), Mode::kTraining);
  const PassTurn::Origin mine = turn.origin();
  turn.end_forward();
  const auto message = thrown_elsewhere([&] {
    turn.join_backward(of_device(1), mine);
    turn.join_backward(of_device(2), {.turn = mine.turn + 7, .thread = mine.thread + 7});
  });
  ASSERT_TRUE(message);
  EXPECT_NE(message->find("two threads run backward passes"), std::string::npos) << *message;
  turn.end_task(1);
}

TEST(PassTurnTest, ASectionThatRunsBackwardTakesItsFirstPass) {
  PassTurn turn;
  turn.enter_section(me(), Section::kRunsBackward, "booster.backward");
  std::jthread([&] {  // over a graph that another thread has made
    turn.join_backward(of_device(1), {.turn = 0, .thread = 1'000'000});
    EXPECT_TRUE(turn.mine(of_device(1)));
  })
      .join();
  turn.end_task(1);
  EXPECT_TRUE(turn.mine(me()));
  turn.end_section(Section::kRunsBackward);
}

TEST(PassTurnTest, OnlyInferenceOfOtherThreadsWaitsForTheStep) {
  PassTurn turn;
  turn.enter_forward(me(), Mode::kTraining);
  turn.end_forward();
  turn.join_backward(me(1), {});
  turn.step_is_due();
  turn.end_task(1);
  turn.enter_forward(me(), Mode::kInference);  // to be refused by what the weights are between
  turn.end_forward();
  bool stepped = false;
  std::jthread other([&] {
    turn.enter_forward(me(), Mode::kInference);
    EXPECT_TRUE(stepped);
    turn.end_forward();
  });
  while (turn.num_waiting() == 0) {
    std::this_thread::yield();
  }
  turn.enter_section(me(), Section::kPlain, "a step");  // not behind the one that waits for it
  stepped = true;
  turn.step_is_over();
  turn.end_section(Section::kPlain);
}

TEST(PassTurnTest, AStepThatNeverComesLetsInferenceThrough) {
  const ShortPatience patience;
  PassTurn turn;
  turn.join_backward(me(1), {});
  turn.step_is_due();
  turn.end_task(1);
  EXPECT_FALSE(thrown_elsewhere([&] {
    turn.enter_forward(me(), Mode::kInference);
    turn.end_forward();
  }));
}

}  // namespace
}  // namespace castor
