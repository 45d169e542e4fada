// Several who hold chunks of one window at the same time: in threads of their own, more than one
// chunk at once, beside reads ahead, with transfers that fail.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "io/chunk_stream.h"
#include "io/fault_injection.h"
#include "io/stream_bench.h"
#include "io/test_support.h"

namespace castor {
namespace {

using test::change_all;
using test::changed;
using test::Contents;
using test::equal;
using test::expect_all;
using test::kChunks;
using test::kParts;
using test::matches;
using test::Payloads;
using test::store;
using Pin = ChunkStream::Pin;

constexpr StreamAccess kRead = StreamAccess::kRead;
constexpr StreamAccess kUpdate = StreamAccess::kUpdate;
constexpr StreamAccess kEdit = StreamAccess::kEdit;

class ChunkStreamPinTest : public test::StreamPlaceTest {
 protected:
  static Pin waited(ChunkStream& stream, std::size_t chunk, StreamAccess access) {
    Pin pin = stream.pin(chunk);
    pin.wait(access);
    return pin;
  }
  static std::vector<Pin> pin_all(ChunkStream& stream, std::vector<std::size_t> chunks) {
    return stream.pin(chunks);
  }
  static bool all_zero(Payloads payloads) {
    return std::all_of(payloads.begin(), payloads.end(), [](std::span<const std::byte> payload) {
      return std::all_of(payload.begin(), payload.end(),
                         [](std::byte value) { return value == std::byte{0}; });
    });
  }
  /// What was brought in is read again from now on.
  static void empty_window(ChunkStream& stream) {
    for (std::size_t chunk = kChunks - stream.num_slots(); chunk < kChunks; ++chunk) {
      stream.use(chunk, kRead, [](Payloads) {});
    }
  }
};

TEST_P(ChunkStreamPinTest, AllWhoPinAChunkSeeTheSameMemoryReadOnce) {
  const auto bench = make_bench();
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  empty_window(stream);
  const std::uint64_t read_before = stream.counts().read_bytes;
  Pin first = stream.pin(0);
  const std::uint64_t read_once = stream.counts().read_bytes;
  EXPECT_GT(read_once, read_before);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      Pin pin = stream.pin(0);
      pin.wait(kRead);
      EXPECT_EQ(pin.payloads()[0].data(), first.payloads()[0].data());
      EXPECT_TRUE(equal(pin.payloads(), 0, stored));
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(stream.counts().read_bytes, read_once);
}

TEST_P(ChunkStreamPinTest, APinnedChunkStaysWhereItIs) {
  const auto bench = make_bench({}, 2);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  Pin pin = waited(stream, 2, kRead);
  const std::byte* const place = pin.payloads()[0].data();
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    stream.prefetch(chunk);
    EXPECT_TRUE(matches(stream, chunk, stored));
    EXPECT_EQ(pin.payloads()[0].data(), place);
    EXPECT_TRUE(equal(pin.payloads(), 2, stored));
  }
}

// The runtime's holds begin in one thread and end in another: a chunk is brought in by a forward
// and sent away by an allocation elsewhere.
TEST_P(ChunkStreamPinTest, APinEndsInAnyThread) {
  const auto bench = make_bench({}, 2);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  std::optional<Pin> own = waited(stream, 0, kRead);
  std::thread([&] {
    const Pin other = waited(stream, 1, kRead);
    own.reset();
    EXPECT_TRUE(matches(stream, 2, stored)) << "the slot of chunk 0 is free";
    EXPECT_TRUE(equal(other.payloads(), 1, stored)) << "that of chunk 1 is not";
    EXPECT_THROW((void)pin_all(stream, {2, 3}), OutOfMemory) << "it is this thread's";
  }).join();
  EXPECT_EQ(pin_all(stream, {2, 3}).size(), 2U);
}

TEST_P(ChunkStreamPinTest, WhereThisThreadPinsEverySlotThereIsNoMore) {
  const auto bench = make_bench({}, 2);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  {
    const std::vector<Pin> pins = pin_all(stream, {0, 1});
    EXPECT_TRUE(matches(stream, 1, stored)) << "it is there";
    try {
      (void)stream.pin(2);
      FAIL() << "there are 2 slots, and a third chunk was held";
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(error.tier(), TierKind::kHost);
      EXPECT_NE(std::string(error.what()).find("part 0 of chunk 2"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("each of the 2 slots"), std::string::npos)
          << error.what();
    }
    EXPECT_THROW((void)pin_all(stream, {0, 3}), OutOfMemory);
  }
  EXPECT_THROW((void)pin_all(stream, {0, 1, 2}), OutOfMemory);
  expect_all(stream, stored);  // what failed keeps nothing
}

TEST_P(ChunkStreamPinTest, WhereOthersPinTheSlotsItWaitsForThem) {
  const auto bench = make_bench({}, 2);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  std::atomic<bool> ended = false;
  std::vector<Pin> pins = pin_all(stream, {0, 1});
  std::thread other([&] {
    Pin pin = stream.pin(2);
    EXPECT_TRUE(ended);
    pin.wait(kRead);
    EXPECT_TRUE(equal(pin.payloads(), 2, stored));
  });
  ended = true;
  pins.clear();
  other.join();
}

// Who holds a slot and needs another one has to get it before who could wait holding nothing: an
// operator's memory is short, and what leaves the device to make room is written to its place on
// the disk.
TEST_P(ChunkStreamPinTest, WhoWaitsForSeveralKeepsNoneFromWhoPinsSome) {
  const auto bench = make_bench({}, 3);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> begun = false;
    std::vector<Pin> pins = pin_all(stream, {0, 1});
    std::thread other([&] {
      begun = true;
      for (Pin& pin : pin_all(stream, {2, 3})) {
        pin.wait(kRead);
      }
    });
    while (!begun) {
      std::this_thread::yield();
    }
    for (int i = 0; i < 20 * round; ++i) {
      std::this_thread::yield();  // until it waits, most of the time
    }
    EXPECT_TRUE(matches(stream, 4, stored));
    pins.clear();
    other.join();
  }
}

TEST_P(ChunkStreamPinTest, ThoseWhoWaitForEachOtherAreToldSo) {
  const auto bench = make_bench({}, 2);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  std::atomic<int> num_ready = 0;
  std::atomic<int> num_refused = 0;
  const auto take_two = [&](std::size_t first) {
    const Pin one = waited(stream, first, kRead);
    for (++num_ready; num_ready < 2;) {
      std::this_thread::yield();
    }
    try {
      const Pin two = waited(stream, first + 2, kRead);
      EXPECT_TRUE(equal(two.payloads(), first + 2, stored));
    } catch (const OutOfMemory&) {
      ++num_refused;
    }
  };
  std::thread other([&] { take_two(1); });
  take_two(0);
  other.join();
  EXPECT_EQ(num_refused, 1) << "the other one got what this one gave back";
}

TEST_P(ChunkStreamPinTest, HoldersOfSeveralGoOnWithTheFewestSlots) {
  constexpr std::size_t kThreads = 4;
  constexpr int kRounds = 50;
  for (const std::size_t num_slots : {3U, 4U}) {
    const auto bench = make_bench({}, num_slots);
    ChunkStream& stream = *bench->stream;
    Contents expected = store(stream);
    std::array<std::mutex, kChunks> turns;  // who changes a chunk keeps others from changing it
    std::array<std::atomic<int>, kChunks> num_changes{};
    const auto work = [&](unsigned seed) {
      std::mt19937 random(seed);
      for (int round = 0; round < kRounds; ++round) {
        std::vector<std::size_t> chunks;
        for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
          if (random() % 2 == 0 && chunks.size() < 3) {
            chunks.push_back(chunk);
          }
        }
        stream.prefetch(random() % kChunks);
        std::vector<std::unique_lock<std::mutex>> own;
        for (const std::size_t chunk : chunks) {
          own.emplace_back(turns[chunk]);
        }
        std::vector<Pin> pins = stream.pin(chunks);
        for (std::size_t i = 0; i < chunks.size(); ++i) {
          const StreamAccess access = random() % 2 == 0 ? kUpdate : kEdit;
          if (random() % 3 == 0) {
            pins[i].wait(kRead);
            continue;
          }
          pins[i].wait(access);
          change_all(pins[i].payloads());
          ++num_changes[chunks[i]];
          if (random() % 4 == 0) {
            stream.use(chunks[i], kUpdate, [](Payloads) {});  // again, while it is held
          }
        }
        if (random() % 2 == 0) {
          pins.clear();
        }
      }
    };
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < kThreads; ++i) {
      threads.emplace_back(work, i + 1);
    }
    for (int i = 0; i < kRounds; ++i) {
      stream.flush();
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    stream.flush();
    empty_window(stream);
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      for (int i = 0; i < num_changes[chunk]; ++i) {
        for (std::size_t part = 0; part < kParts; ++part) {
          test::change(expected[chunk * kParts + part]);
        }
      }
    }
    expect_all(stream, expected);
  }
}

TEST_P(ChunkStreamPinTest, AnUpdateIsWrittenOnceTheLastPinEnds) {
  const auto bench = make_bench();
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  const std::uint64_t written_before = stream.counts().written_bytes;
  Pin reader = waited(stream, 3, kRead);
  {
    Pin updater = waited(stream, 3, kUpdate);
    change_all(updater.payloads());
    Pin editor = waited(stream, 3, kEdit);
    change_all(editor.payloads());
  }
  EXPECT_EQ(stream.counts().written_bytes, written_before);
  reader.release();
  EXPECT_GT(stream.counts().written_bytes, written_before);
  stream.flush();
  empty_window(stream);
  EXPECT_TRUE(matches(stream, 3, changed(changed(stored))));
}

TEST_P(ChunkStreamPinTest, AnEditIsWrittenWhenItsMemoryIsNeeded) {
  const auto bench = make_bench({}, 2);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  const std::uint64_t written_before = stream.counts().written_bytes;
  {
    Pin pin = waited(stream, 0, kEdit);
    change_all(pin.payloads());
  }
  EXPECT_EQ(stream.counts().written_bytes, written_before);
  empty_window(stream);
  EXPECT_GT(stream.counts().written_bytes, written_before);
  EXPECT_TRUE(matches(stream, 0, changed(stored)));
}

TEST_P(ChunkStreamPinTest, AFlushLeavesWhatIsBeingChangedToItsHolder) {
  const auto bench = make_bench();
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  const std::uint64_t written_before = stream.counts().written_bytes;
  {
    Pin pin = waited(stream, 0, kEdit);
    test::change(pin.payloads()[0]);
    stream.flush();
    EXPECT_EQ(stream.counts().written_bytes, written_before);
    test::change(pin.payloads()[1]);
  }
  EXPECT_GT(stream.counts().written_bytes, written_before);
  empty_window(stream);
  EXPECT_TRUE(matches(stream, 0, changed(stored)));
}

TEST_P(ChunkStreamPinTest, AMovedPinEndsOnce) {
  const auto bench = make_bench({}, 1);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  Pin first = waited(stream, 0, kRead);
  {
    Pin second = std::move(first);
    EXPECT_TRUE(equal(second.payloads(), 0, stored));
    EXPECT_THROW((void)stream.pin(1), OutOfMemory);
    second.release();
    second.release();
  }
  first.release();
  EXPECT_TRUE(matches(stream, 1, stored));
}

TEST_P(ChunkStreamPinTest, AFailedReadReachesEveryHolderAndTheChunkCanBeReadAgain) {
  std::uint64_t first_read = 0;
  {
    const auto bench = make_bench();
    store(*bench->stream);
    empty_window(*bench->stream);
    first_read = engine_->counts().reads;
  }
  const auto bench = make_bench({{IoFault::Kind::kErrno, EIO, first_read, 1, IoOperation::kRead}});
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  empty_window(stream);
  std::vector<Pin> pins;
  for (int i = 0; i < 3; ++i) {
    pins.push_back(stream.pin(0));
  }
  std::atomic<int> num_failed = 0;
  const auto wait = [&](Pin& pin, StreamAccess access) {
    try {
      pin.wait(access);
    } catch (const IoError& error) {
      EXPECT_EQ(error.error_number(), EIO);
      ++num_failed;
    }
  };
  std::thread other([&] { wait(pins[0], kRead); });
  wait(pins[1], kUpdate);
  other.join();
  wait(pins[2], kRead);
  wait(pins[2], kRead);
  EXPECT_EQ(num_failed, 4);
  EXPECT_FALSE(stream.torn());
  EXPECT_TRUE(matches(stream, 0, stored)) << "while others still hold what failed";
  pins.clear();
  expect_all(stream, stored);
  EXPECT_EQ(pin_all(stream, {0, 1, 2}).size(), 3U) << "every slot is free again";
}

TEST_P(ChunkStreamPinTest, AfterAFailedWriteHoldersKeepTheirMemoryAndTheChunkIsTorn) {
  const auto bench = make_bench({{IoFault::Kind::kErrno, EIO, 0, 1, IoOperation::kWrite}}, 2);
  ChunkStream& stream = *bench->stream;
  stream.use(0, kUpdate, change_all);
  Pin reader = waited(stream, 0, kRead);  // beside the write
  const Contents held = {{reader.payloads()[0].begin(), reader.payloads()[0].end()},
                         {reader.payloads()[1].begin(), reader.payloads()[1].end()}};
  EXPECT_THROW(stream.flush(), IoError);
  EXPECT_TRUE(stream.torn());
  EXPECT_THROW(reader.wait(kRead), IoError);
  EXPECT_THROW(reader.wait(kUpdate), IoError);
  EXPECT_THROW((void)waited(stream, 0, kRead), UsageError);
  stream.use(1, kUpdate, change_all);
  stream.use(2, kUpdate, change_all);
  EXPECT_TRUE(equal(reader.payloads(), 0, held));
  reader.release();
  EXPECT_EQ(pin_all(stream, {1, 2}).size(), 2U) << "both slots are free again";
  stream.discard(0);
  EXPECT_TRUE(all_zero(waited(stream, 0, kRead).payloads()));
  stream.discard_all();
  EXPECT_FALSE(stream.torn());
  expect_all(stream, store(stream));
}

// The write of a chunk that is displaced belongs to whoever needs its memory.
TEST_P(ChunkStreamPinTest, APinThatCannotHaveItsSlotKeepsNothing) {
  const auto bench = make_bench({{IoFault::Kind::kErrno, EIO, 0, 1, IoOperation::kWrite}}, 2);
  ChunkStream& stream = *bench->stream;
  stream.use(0, kEdit, change_all);
  EXPECT_THROW((void)pin_all(stream, {1, 2}), IoError);
  EXPECT_TRUE(stream.torn());
  std::thread([&] { EXPECT_EQ(pin_all(stream, {1, 2}).size(), 2U); }).join();
  EXPECT_EQ(pin_all(stream, {2, 3}).size(), 2U);
}

TEST_P(ChunkStreamPinTest, WhatIsDiscardedInTheWindowIsForgotten) {
  const auto bench = make_bench();
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  const auto expect_zeros = [&] {
    EXPECT_TRUE(all_zero(waited(stream, 4, kRead).payloads()));
    EXPECT_TRUE(matches(stream, 3, stored));
    store(stream);
  };
  stream.prefetch(4);  // its read may be under way
  stream.discard(4);
  expect_zeros();
  stream.use(4, kEdit, change_all);  // to be written
  stream.discard(4);
  expect_zeros();
  stream.use(4, kUpdate, change_all);  // its write may be under way
  stream.discard(4);
  expect_zeros();
  empty_window(stream);
  stream.use(0, kRead, [](Payloads) {});
  stream.use(1, kRead, [](Payloads) {});
  stream.use(2, kRead, [](Payloads) {});
  stream.discard(4);  // not in the window
  expect_zeros();
  expect_all(stream, stored);
}

TEST_P(ChunkStreamPinTest, ReadingAheadTakesNothingFromHolders) {
  const auto bench = make_bench({}, 2);
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  std::vector<Pin> pins = pin_all(stream, {0, 1});
  const std::uint64_t read_before = stream.counts().read_bytes;
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    stream.prefetch(chunk);
  }
  EXPECT_EQ(stream.counts().read_bytes, read_before);
  pins.pop_back();
  stream.forget_announced();
  stream.prefetch(2);
  EXPECT_GT(stream.counts().read_bytes, read_before);
  pins.front().wait(kRead);
  EXPECT_TRUE(equal(pins.front().payloads(), 0, stored));
}

TEST_P(ChunkStreamPinTest, AForkedProcessIsRefused) {
  const auto bench = make_bench();
  ChunkStream& stream = *bench->stream;
  const Contents stored = store(stream);
  const pid_t child = fork();
  ASSERT_NE(child, -1) << errno;
  if (child == 0) {
    int num_refused = 0;
    const auto count = [&](auto&& call) {
      try {
        call();
      } catch (const UsageError&) {
        ++num_refused;
      }
    };
    count([&] { (void)stream.pin(0); });
    count([&] { (void)pin_all(stream, {0, 1}); });
    count([&] { stream.use(0, kRead, [](Payloads) {}); });
    count([&] { stream.prefetch(0); });
    count([&] { stream.discard(0); });
    count([&] { stream.flush(); });
    _exit(num_refused);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 6);
  expect_all(stream, stored);
}

INSTANTIATE_TEST_SUITE_P(Every, ChunkStreamPinTest, ::testing::ValuesIn(test::every_place()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace castor
