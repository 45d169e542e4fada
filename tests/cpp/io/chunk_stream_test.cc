// Optimizer steps in miniature: chunks of odd sizes on NVMe, changed through a small window, with
// an adversary under the transfers.

#include "io/chunk_stream.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "core/error.h"
#include "io/fault_injection.h"
#include "io/stream_bench.h"
#include "io/test_support.h"

namespace castor {
namespace {

using test::change;
using test::change_all;
using test::changed;
using test::Contents;
using test::expect_all;
using test::kChunks;
using test::kParts;
using test::matches;
using test::Payloads;
using test::store;

class ChunkStreamTest : public test::StreamPlaceTest {};

/// The chunks of a stream after one another, each announced while the one before is worked on.
/// Returns how many were begun; `failed` gets what stopped it.
std::size_t step(ChunkStream& stream, std::exception_ptr& failed) {
  std::size_t num_begun = 0;
  try {
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      for (std::size_t i = chunk; i <= std::min(chunk + stream.max_ahead(), kChunks - 1); ++i) {
        stream.prefetch(i);
      }
      stream.use(chunk, StreamAccess::kUpdate, [&](Payloads payloads) {
        ++num_begun;
        change_all(payloads);
      });
    }
    stream.flush();
  } catch (const Error&) {
    failed = std::current_exception();
  }
  return num_begun;
}

void step(ChunkStream& stream) {
  std::exception_ptr failed;
  step(stream, failed);
  if (failed) {
    std::rethrow_exception(failed);
  }
}

TEST_P(ChunkStreamTest, StepsChangeEveryByteWithAnyNumberOfSlots) {
  for (const std::size_t num_slots : {1, 2, 3, 4}) {
    for (const Verification verification : {Verification::kOn, Verification::kOff}) {
      const auto bench = make_bench({}, num_slots, verification);
      EXPECT_EQ(bench->stream->num_slots(), num_slots);
      const Contents stored = store(*bench->stream);
      step(*bench->stream);
      step(*bench->stream);
      expect_all(*bench->stream, changed(changed(stored)));
    }
  }
}

TEST_P(ChunkStreamTest, AnAnnouncedChunkIsReadBesideTheOneInUse) {
  const auto bench = make_bench();
  store(*bench->stream);
  bench->stream->prefetch(0);
  std::vector<std::byte*> places;
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk + 1 < kChunks) {
      bench->stream->prefetch(chunk + 1);
    }
    const std::uint64_t read_before = bench->stream->counts().read_bytes;
    bench->stream->use(chunk, StreamAccess::kUpdate,
                       [&](Payloads payloads) { places.push_back(payloads[0].data()); });
    EXPECT_EQ(bench->stream->counts().read_bytes, read_before);  // its read had begun
  }
  for (std::size_t i = 1; i < places.size(); ++i) {
    EXPECT_NE(places[i], places[i - 1]);
  }
}

TEST_P(ChunkStreamTest, AnnouncingMoreThanThereIsRoomForTakesNothingAway) {
  const auto bench = make_bench({}, 2);
  const Contents stored = store(*bench->stream);
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    bench->stream->prefetch(chunk);
  }
  const std::uint64_t read_before = bench->stream->counts().read_bytes;
  EXPECT_TRUE(matches(*bench->stream, 0, stored));
  EXPECT_TRUE(matches(*bench->stream, 1, stored));
  EXPECT_EQ(bench->stream->counts().read_bytes, read_before);
  expect_all(*bench->stream, stored);
}

TEST_P(ChunkStreamTest, EditsOfAChunkAreWrittenOnceAndWhatIsInMemoryIsNotReadAgain) {
  const auto bench = make_bench();
  std::size_t bytes = 0;
  for (int i = 0; i < 10; ++i) {
    bench->stream->use(3, StreamAccess::kEdit, [&](Payloads payloads) {
      bytes = align_up(payloads[0].size(), 4096) + align_up(payloads[1].size(), 4096);
      payloads[0][0] = std::byte{7};
    });
  }
  EXPECT_EQ(bench->stream->counts().written_bytes, 0U);
  bench->stream->flush();
  bench->stream->flush();
  EXPECT_EQ(bench->stream->counts().written_bytes, bytes);
  bench->stream->use(3, StreamAccess::kRead,
                     [](Payloads payloads) { EXPECT_EQ(payloads[0][0], std::byte{7}); });
  EXPECT_EQ(bench->stream->counts().read_bytes, 0U);
}

TEST_P(ChunkStreamTest, WhatWasNeverWrittenOrIsDiscardedReadsAsZeros) {
  const auto bench = make_bench();
  const auto expect_zeros = [&] {
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      bench->stream->use(chunk, StreamAccess::kRead, [](Payloads payloads) {
        for (const auto payload : payloads) {
          EXPECT_EQ(std::count(payload.begin(), payload.end(), std::byte{0}),
                    static_cast<std::ptrdiff_t>(payload.size()));
        }
      });
    }
  };
  expect_zeros();
  store(*bench->stream);
  bench->stream->discard_all();
  expect_zeros();
}

TEST_P(ChunkStreamTest, AWindowThatHoldsNoChunkIsRefused) {
  EXPECT_THROW((void)make_bench({}, 0), InvalidArgument);
}

TEST_P(ChunkStreamTest, RetriedFaultsChangeNoBit) {
  using Kind = IoFault::Kind;
  const std::vector<IoFault> harmless[] = {{{Kind::kErrno, EINTR, 2, 5}},
                                           {{Kind::kErrno, EAGAIN, 9, 20}},
                                           {{Kind::kShort, 4096, 0, 30}},
                                           {{Kind::kShort, 1, 5, 30}},
                                           {{Kind::kDelay, 6, 3, 4}}};
  for (const auto& faults : harmless) {
    const auto bench = make_bench(faults);
    const Contents stored = store(*bench->stream);
    step(*bench->stream);
    expect_all(*bench->stream, changed(stored));
  }
}

// The heart of it: whatever operation of a step fails in whatever way, either the step says so, and
// every chunk is the old one, the new one, or refuses to be read, or its result is that of a step
// without faults. What was lost can be written anew.
TEST_P(ChunkStreamTest, AFaultAtEveryOperationIsNeverSilent) {
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  {
    const auto bench = make_bench();
    store(*bench->stream);
    first = num_operations();
    step(*bench->stream);
    last = num_operations();
  }
  ASSERT_GT(last - first, 30U);
  const IoFault kinds[] = {{IoFault::Kind::kErrno, EIO},
                           {IoFault::Kind::kErrno, ENOSPC},
                           {IoFault::Kind::kShort, 4096},
                           {IoFault::Kind::kBitFlip}};
  std::size_t num_named = 0;
  for (IoFault fault : kinds) {
    for (fault.first = first; fault.first < last; ++fault.first) {
      const auto bench = make_bench({fault});
      const Contents old = store(*bench->stream);
      const Contents updated = changed(old);
      std::exception_ptr failed;
      const std::size_t num_begun = step(*bench->stream, failed);
      if (!failed) {
        ASSERT_NE(fault.kind, IoFault::Kind::kErrno);
      }
      for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
        try {
          const bool is_new = matches(*bench->stream, chunk, updated);
          ASSERT_TRUE(is_new || (failed && matches(*bench->stream, chunk, old)));
          ASSERT_TRUE(!is_new || chunk < num_begun);
        } catch (const Error&) {
          failed = failed ? failed : std::current_exception();
        }
      }
      if (!failed) {
        continue;
      }
      ++num_named;
      try {
        std::rethrow_exception(failed);
      } catch (const CorruptionError& error) {
        EXPECT_EQ(fault.kind, IoFault::Kind::kBitFlip);
        EXPECT_NE(std::string(error.what()).find(" of chunk "), std::string::npos);
        EXPECT_EQ(error.error_number(), EBADMSG);
        EXPECT_NE(error.expected(), error.found());
      } catch (const IoError& error) {
        EXPECT_EQ(fault.kind, IoFault::Kind::kErrno);
        EXPECT_EQ(error.error_number(), static_cast<int>(fault.value));
      }
      bench->stream->discard_all();  // a checkpoint is loaded
      expect_all(*bench->stream, store(*bench->stream));
    }
  }
  // EIO, ENOSPC and a flipped bit at every operation; what was short was continued. A bit that
  // flips in a chunk which is still in memory afterwards is found at the next read, not here.
  EXPECT_GE(num_named, 2 * (last - first));
}

TEST_P(ChunkStreamTest, ATornChunkRefusesToBeReadUntilItIsDiscarded) {
  const auto bench = make_bench({{IoFault::Kind::kErrno, EIO, 0, 1, IoOperation::kWrite}}, 1,
                                Verification::kOn, 1);
  bench->stream->use(0, StreamAccess::kUpdate, change_all);
  EXPECT_FALSE(bench->stream->torn());
  EXPECT_THROW(bench->stream->flush(), IoError);
  EXPECT_TRUE(bench->stream->torn());
  try {
    bench->stream->use(0, StreamAccess::kUpdate, change_all);
    FAIL() << "a torn payload was read";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "part 0 of chunk 0 is half-written on NVMe, because its last write failed: load a "
                 "checkpoint");
  }
  bench->stream->discard_all();
  EXPECT_FALSE(bench->stream->torn());
  expect_all(*bench->stream, store(*bench->stream));
}

TEST_P(ChunkStreamTest, WhatFailedWorkLeftBehindCounts) {
  const auto bench = make_bench();
  Contents expected = store(*bench->stream);
  EXPECT_THROW(bench->stream->use(3, StreamAccess::kUpdate,
                                  [](Payloads payloads) {
                                    change(payloads[0]);
                                    throw UsageError("the work failed");
                                  }),
               UsageError);
  change(expected[3 * kParts]);
  expect_all(*bench->stream, expected);
}

TEST_P(ChunkStreamTest, WhatSomebodyElseChangedInTheFileIsFoundAndNamed) {
  const auto bench = make_bench();
  const Contents stored = store(*bench->stream);
  for (std::size_t chunk = 2; chunk < kChunks; ++chunk) {
    EXPECT_TRUE(matches(*bench->stream, chunk, stored));  // chunk 0 leaves the window
  }
  const auto pieces = space_->pieces(0, std::span(bench->memory).first(4096));
  const std::string path = space_->files()[0].file().path();
  // Chunk 0 begins the space; its first part is 1 byte long, and padded.
  const std::uint64_t place = pieces[0].offset + 4096 + 1'000;
  {
    std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
    stream.seekp(static_cast<std::streamoff>(place));
    char byte = 0;
    stream.read(&byte, 1);
    byte = static_cast<char>(byte ^ 1);
    stream.seekp(static_cast<std::streamoff>(place));
    stream.write(&byte, 1);
  }
  try {
    bench->stream->use(0, StreamAccess::kRead, [](Payloads) { FAIL() << "damage was handed out"; });
    FAIL() << "the damage was not seen";
  } catch (const CorruptionError& error) {
    EXPECT_EQ(error.path(), path);
    EXPECT_EQ(error.offset(), pieces[0].offset + 4096);
    EXPECT_NE(std::string(error.what()).find("part 1 of chunk 0 (its byte 0)"), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(matches(*bench->stream, 1, stored));
}

TEST_P(ChunkStreamTest, ThreadsTakeTurns) {
  const auto bench = make_bench();
  Contents expected = store(*bench->stream);
  const auto work = [&](std::size_t first) {
    for (int round = 0; round < 20; ++round) {
      for (std::size_t chunk = first; chunk < kChunks; chunk += 2) {
        bench->stream->prefetch(chunk);
        bench->stream->use(chunk, StreamAccess::kUpdate, change_all);
      }
    }
  };
  std::thread other([&] { work(1); });
  work(0);
  other.join();
  bench->stream->flush();
  for (int round = 0; round < 20; ++round) {
    expected = changed(std::move(expected));
  }
  expect_all(*bench->stream, expected);
}

INSTANTIATE_TEST_SUITE_P(Every, ChunkStreamTest, ::testing::ValuesIn(test::every_place()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace castor
