// A seeded random walk over the runtime, with other threads that take and give back device memory
// all the while, and copies that fail: modules come and go in any order, and whatever happened, the
// modules under way have their chunks on the device, with the right bytes, nothing else is pinned,
// and no byte passes the budget.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/machine.h"
#include "core/runtime.h"
#include "core/steps.h"

namespace castor {
namespace {

using testing::chunk_id;
using testing::InjectedFailure;
using testing::module_id;
using testing::Net;
using testing::param_id;
using testing::SimulatedMachine;

struct Adversary {
  const char* name;
  unsigned seed;
  std::size_t num_threads;
  bool failures;
  FreedSlots freed_slots = FreedSlots::kReusedAtOnce;
  bool stored = false;  // host storage of some chunks
};

void PrintTo(const Adversary& adversary, std::ostream* out) { *out << adversary.name; }

/// Threads that allocate and free activations between two meetings with the test.
class Allocators {
 public:
  Allocators(SimulatedMachine& machine, std::size_t count, unsigned seed)
      : machine_(machine), meeting_(static_cast<std::ptrdiff_t>(count + 1)) {
    for (std::size_t i = 0; i < count; ++i) {
      threads_.emplace_back([this, seed, i] { run(seed + static_cast<unsigned>(i)); });
    }
  }
  Allocators(const Allocators&) = delete;
  Allocators& operator=(const Allocators&) = delete;
  ~Allocators() {
    stop_ = true;
    meeting_.arrive_and_wait();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  /// The threads allocate while `act` runs, and hold still afterwards, each with what it has.
  template <typename Act>
  void during(Act&& act) {
    meeting_.arrive_and_wait();
    act();
    meeting_.arrive_and_wait();
  }
  [[nodiscard]] std::uint64_t allocations() const { return allocations_; }

 private:
  void run(unsigned seed) {
    std::mt19937 random(seed);
    std::size_t held = 0;
    for (;;) {
      meeting_.arrive_and_wait();
      if (stop_) {
        return machine_.nonmodel->free(held);
      }
      for (int i = 0; i < 20; ++i) {
        machine_.nonmodel->free(std::exchange(held, 0));
        const std::size_t bytes = 1 + random() % 300;
        try {
          machine_.nonmodel->allocate(bytes);
          held = bytes;
          ++allocations_;
        } catch (const OutOfMemory&) {      // all is pinned
        } catch (const InjectedFailure&) {  // a write-back failed
        }
      }
      meeting_.arrive_and_wait();
    }
  }

  SimulatedMachine& machine_;
  std::barrier<> meeting_;
  std::atomic<bool> stop_{false};  // the barrier orders it
  std::atomic<std::uint64_t> allocations_{0};
  std::vector<std::thread> threads_;
};

class Walk {
 public:
  explicit Walk(const Adversary& adversary)
      : adversary_(adversary),
        random_(adversary.seed),
        net_(make_net(random_)),
        machine_(net_.layout(), device_bytes(),
                 {.max_prefetch = 2, .freed_slots = adversary.freed_slots}, some_placements(),
                 adversary.stored ? some_stored() : std::vector<bool>()),
        allocators_(machine_, adversary.num_threads, adversary.seed + 1000),
        values_(net_.params.size()) {
    for (std::size_t i = 0; i < values_.size(); ++i) {
      values_[i] = testing::Rig::initial(i);
    }
  }
  ~Walk() {
    machine_.rig.engine.never_fail();
    machine_.runtime->move_to_host();
  }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  void run(std::size_t rounds) {
    for (std::size_t i = 0; i < rounds; ++i) {
      allocators_.during([this] {
        for (std::size_t acts = 1 + below(4); acts > 0; --acts) {
          operate();
        }
      });
      write();
      check();
      if (::testing::Test::HasFailure()) {
        FAIL() << "seed " << adversary_.seed << ", round " << i << ": " << last_;
      }
    }
    EXPECT_TRUE(adversary_.num_threads == 0 || allocators_.allocations() > rounds);
    EXPECT_GT(entered_, rounds / 10);
  }

 private:
  static Net make_net(std::mt19937& random) {
    Net net = testing::random_net(random);
    for (int i = 0; i < 6; ++i) {
      net.add({16, 16, 48}, module_id(random() % net.modules.size()));
    }
    return net;
  }
  [[nodiscard]] const ChunkLayout& layout() const { return machine_.rig.layout; }
  [[nodiscard]] std::size_t num_chunks() const { return layout().chunks().size(); }
  std::size_t below(std::size_t bound) { return random_() % bound; }

  // What the largest module needs, and half of what is left.
  [[nodiscard]] std::size_t device_bytes() const {
    const ChunkLayout layout = net_.layout();
    return (layout.largest_working_set_bytes() + layout.used_bytes()) / 2 +
           layout.largest_working_set_bytes();
  }
  [[nodiscard]] std::vector<Placement> some_placements() const {
    std::vector<Placement> placements(net_.layout().chunks().size(), Placement::kStream);
    placements[0] = Placement::kKeep;
    return placements;
  }
  [[nodiscard]] std::vector<bool> some_stored() const {
    std::vector<bool> stored(net_.layout().chunks().size());
    for (std::size_t i = 0; i < stored.size(); ++i) {
      stored[i] = i % 3 == 1;
    }
    return stored;
  }

  void operate() {
    if (adversary_.failures && below(10) == 0) {
      below(2) == 0 ? machine_.rig.engine.fail_submit(1 + below(3))
                    : machine_.rig.engine.fail_wait(1 + below(3));
    }
    try {
      act();
    } catch (const OutOfMemory&) {
    } catch (const InjectedFailure&) {
      EXPECT_TRUE(adversary_.failures);
    }
  }

  void act() {
    const std::size_t module = below(net_.modules.size());
    last_ = "module " + std::to_string(module);
    Runtime& runtime = *machine_.runtime;
    switch (below(8)) {
      case 0:
      case 1:
      case 2: {
        last_ += " enter";
        backward_.reset();
        if (module == 0) {
          entered_modules_.clear();
        }
        runtime.enter(module_id(module),
                      below(4) == 0 ? PassMode::kInference : PassMode::kTraining);
        entered_modules_.push_back(module);
        ++entered_;
        return;
      }
      case 3: {
        last_ += " exit";
        const auto last = std::find(entered_modules_.rbegin(), entered_modules_.rend(), module);
        if (last != entered_modules_.rend()) {
          entered_modules_.erase(last.base() - 1, entered_modules_.end());
        }
        return runtime.exit(module_id(module));
      }
      case 4:
        last_ += " backward";
        backward_.reset();
        runtime.enter_backward(module_id(module));
        backward_ = module;
        return;
      case 5:
        last_ = "gradients of module " + std::to_string(module);
        for (const ParamId param : layout().module(module_id(module)).params) {
          static_cast<void>(runtime.grad_ready(param));
        }
        return;
      case 6: {
        const ChunkId chunk = chunk_id(below(num_chunks()));
        last_ = "retire of chunk " + std::to_string(index(chunk));
        static_cast<void>(runtime.retire(chunk));
        return;
      }
      default:
        if (below(8) == 0) {
          last_ = "finish_step";
          backward_.reset();
          entered_modules_.clear();
          runtime.finish_step();
          if (runtime.placement_due()) {
            last_ = "place";
            runtime.place(std::vector<bool>(num_chunks(), !adversary_.stored));
          }
        }
    }
  }

  // User code, between two operators.
  void write() {
    const std::size_t param = below(values_.size());
    values_[param] = static_cast<std::uint8_t>(below(256));
    machine_.rig.write(param_id(param), values_[param]);
  }

  void check() {
    const ChunkManager& manager = *machine_.rig.manager;
    machine_.rig.expect_consistent();
    std::vector<std::uint32_t> pins(num_chunks(), 0);
    const auto count = [&](std::size_t module) {
      for (const ChunkId chunk : layout().chunks_of(module_id(module))) {
        ++pins[index(chunk)];
      }
    };
    std::for_each(entered_modules_.begin(), entered_modules_.end(), count);
    std::vector<std::uint32_t> without_backward = pins;
    if (backward_) {
      count(*backward_);
    }
    std::vector<std::uint32_t> found(num_chunks());
    for (std::size_t i = 0; i < num_chunks(); ++i) {
      found[i] = manager.pins(chunk_id(i));
    }
    // Memory that ran out may have ended the backward: it goes on from the host copies.
    const bool may_end = adversary_.freed_slots == FreedSlots::kKeepTheirBytes;
    EXPECT_TRUE(found == pins || (may_end && found == without_backward))
        << ::testing::PrintToString(found) << " instead of " << ::testing::PrintToString(pins);
    EXPECT_EQ(machine_.runtime->idle(), entered_modules_.empty());
    for (std::size_t i = 0; i < values_.size(); ++i) {
      EXPECT_TRUE(machine_.rig.reads(param_id(i), values_[i])) << "parameter " << i;
      const std::size_t chunk = index(layout().place(param_id(i)).chunk);
      EXPECT_TRUE(found[chunk] > 0 || manager.state(param_id(i)) != TensorState::kCompute);
    }
  }

  const Adversary adversary_;
  std::mt19937 random_;
  const Net net_;
  SimulatedMachine machine_;
  Allocators allocators_;
  std::vector<std::uint8_t> values_;  // what each parameter must read
  std::vector<std::size_t> entered_modules_;
  std::optional<std::size_t> backward_;
  std::uint64_t entered_ = 0;
  std::string last_;
};

class RuntimeModelTest : public ::testing::TestWithParam<Adversary> {};

TEST_P(RuntimeModelTest, BehavesAsTheModelWhileThreadsAllocate) { Walk(GetParam()).run(4000); }

INSTANTIATE_TEST_SUITE_P(
    Random, RuntimeModelTest,
    ::testing::Values(Adversary{"alone", 1, 0, false}, Adversary{"threads", 2, 3, false},
                      Adversary{"failing", 3, 0, true}, Adversary{"threads_failing", 4, 3, true},
                      Adversary{"keeping_bytes", 5, 2, true, FreedSlots::kKeepTheirBytes},
                      Adversary{"stored", 6, 2, false, FreedSlots::kReusedAtOnce, true}),
    [](const ::testing::TestParamInfo<Adversary>& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace castor
