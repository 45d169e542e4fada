#include "gpu.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <latch>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace castor::simulated {
namespace {

std::shared_ptr<Stream> new_stream(std::uint64_t id = 1) {
  return std::make_shared<Stream>(id, std::make_shared<DeviceError>());
}

TEST(StreamTest, TasksRunInOrderWhateverTheirDelays) {
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    const auto stream = new_stream();
    stream->delay({.seed = seed, .longest = std::chrono::microseconds(50)});
    std::vector<int> order;
    for (int i = 0; i < 200; ++i)
      stream->enqueue([&order, i] { order.push_back(i); });
    stream->synchronize();
    std::vector<int> expected(200);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(order, expected);
  }
}

TEST(StreamTest, EnqueueDoesNotWaitForTheTask) {
  const auto stream = new_stream();
  std::latch go(1);
  stream->enqueue([&go] { go.wait(); });
  EXPECT_FALSE(Moment(stream).past());
  go.count_down();
  stream->synchronize();
  EXPECT_TRUE(Moment(stream).past());
}

TEST(StreamTest, DestructionCompletesWhatWasEnqueued) {
  std::atomic<int> count{0};
  {
    const auto stream = new_stream();
    stream->delay({.seed = 1, .longest = std::chrono::microseconds(50)});
    for (int i = 0; i < 100; ++i)
      stream->enqueue([&count] { ++count; });
  }
  EXPECT_EQ(count, 100);
}

TEST(StreamTest, AClosedStreamRunsTasksOnTheCallingThread) {
  const auto stream = new_stream();
  stream->close();
  std::thread::id where;
  stream->enqueue([&where] { where = std::this_thread::get_id(); });
  EXPECT_EQ(where, std::this_thread::get_id());
  EXPECT_TRUE(Moment(stream).past());
}

TEST(MomentTest, ABlockedStreamWaitsForWhatTheOtherHadBeenGiven) {
  const auto writer = new_stream(1);
  const auto reader = new_stream(2);
  std::latch go(1);
  std::atomic<int> value{0};
  int seen = -1;
  writer->enqueue([&] {
    go.wait();
    value = 1;
  });
  Moment(writer).block(*reader);
  writer->enqueue([&] { value = 2; });
  reader->enqueue([&] { seen = value; });
  EXPECT_FALSE(Moment(reader).past());
  go.count_down();
  reader->synchronize();
  EXPECT_GE(seen, 1);
}

TEST(MomentTest, WithoutAnEventStreamsAreInNoOrder) {
  const auto writer = new_stream(1);
  const auto reader = new_stream(2);
  std::latch go(1);
  std::atomic<int> value{0};
  int seen = -1;
  writer->enqueue([&] {
    go.wait();
    value = 1;
  });
  reader->enqueue([&] { seen = value; });
  reader->synchronize();
  go.count_down();
  EXPECT_EQ(seen, 0);
}

TEST(MomentTest, OfNoStreamIsPast) {
  EXPECT_TRUE(Moment().past());
  const auto stream = new_stream();
  Moment().block(*stream);
  EXPECT_EQ(stream->num_enqueued(), 0);
}

TEST(DeviceErrorTest, TheFirstErrorStaysAndNoLaterTaskRuns) {
  const auto error = std::make_shared<DeviceError>();
  Stream stream(1, error);
  bool ran = false;
  stream.enqueue([] { throw std::runtime_error("index out of range"); });
  stream.enqueue([&ran] { ran = true; });
  stream.enqueue([] { throw std::runtime_error("another"); });
  stream.synchronize();
  EXPECT_FALSE(ran);
  EXPECT_EQ(error->message(), "index out of range");
  error->reset();
  EXPECT_EQ(error->message(), std::nullopt);
}

TEST(GpuTest, RegisteredMemoryIsKnownByItsAddresses) {
  Gpu& gpu = Gpu::instance();
  std::vector<std::byte> memory(64);
  EXPECT_EQ(gpu.register_host(memory.data(), 32), Gpu::Registered::kYes);
  EXPECT_EQ(gpu.register_host(memory.data() + 31, 8), Gpu::Registered::kAlready) << "it overlaps";
  EXPECT_TRUE(gpu.is_registered(memory.data() + 31));
  EXPECT_FALSE(gpu.is_registered(memory.data() + 32));
  EXPECT_TRUE(gpu.unregister_host(memory.data()));
  EXPECT_FALSE(gpu.unregister_host(memory.data()));
}

TEST(GpuTest, NoMoreMemoryIsRegisteredThanTheLimit) {
  Gpu& gpu = Gpu::instance();
  std::vector<std::byte> memory(64);
  gpu.limit_registered(40);
  EXPECT_EQ(gpu.register_host(memory.data(), 32), Gpu::Registered::kYes);
  EXPECT_EQ(gpu.register_host(memory.data() + 32, 9), Gpu::Registered::kBeyondLimit);
  EXPECT_EQ(gpu.register_host(memory.data() + 32, 8), Gpu::Registered::kYes);
  EXPECT_TRUE(gpu.unregister_host(memory.data()));
  EXPECT_EQ(gpu.register_host(memory.data(), 32), Gpu::Registered::kYes);
  EXPECT_TRUE(gpu.unregister_host(memory.data()));
  EXPECT_TRUE(gpu.unregister_host(memory.data() + 32));
  gpu.limit_registered(SIZE_MAX);
}

TEST(GpuTest, ARemovedStreamCompletesItsTasks) {
  Gpu& gpu = Gpu::instance();
  std::atomic<int> count{0};
  const auto id = gpu.new_stream()->id();
  for (int i = 0; i < 50; ++i)
    gpu.stream(id)->enqueue([&count] { ++count; });
  gpu.remove_stream(id);
  EXPECT_EQ(count, 50);
  EXPECT_THROW(static_cast<void>(gpu.stream(id)), std::invalid_argument);
}

TEST(GpuTest, ManyThreadsMayUseOneStream) {
  const auto stream = new_stream();
  std::atomic<int> count{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int k = 0; k < 200; ++k) {
          stream->enqueue([&count] { ++count; });
          if (k % 50 == 0)
            stream->synchronize();
        }
      });
    }
  }
  stream->synchronize();
  EXPECT_EQ(count, 800);
}

}  // namespace
}  // namespace castor::simulated
