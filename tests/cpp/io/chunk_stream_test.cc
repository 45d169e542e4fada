// An optimizer step in miniature: payloads of odd sizes on NVMe, updated through a small ring, with
// an adversary under the transfers.

#include "io/chunk_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/error.h"
#include "core/units.h"
#include "io/fault_injection.h"
#include "io/test_support.h"

namespace castor {
namespace {

constexpr std::size_t kBlock = 64 * kKiB;

class ChunkStreamTest : public test::PlaceTest {
 protected:
  static constexpr std::size_t kChunks = 5;
  static constexpr std::size_t kParts = 2;

  void SetUp() override {
    PlaceTest::SetUp();
    if (!directory_) {
      return;
    }
    std::filesystem::create_directory(*directory_ / "a");
    std::filesystem::create_directory(*directory_ / "b");
    space_ = std::make_unique<ScratchSpace>(
        ScratchOptions{.directories = {*directory_ / "a", *directory_ / "b"},
                       .bytes = 16 * kMiB,
                       .stripe_bytes = kBlock});
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      StreamItem item;
      for (std::size_t part = 0; part < kParts; ++part) {
        // Odd sizes, smaller and larger than a stripe, different in every chunk.
        const std::size_t bytes = 1 + chunk * 40'000 + part * 3'333;
        payloads_.push_back(std::make_unique<StoredPayload>(
            *space_, "part " + std::to_string(part) + " of chunk " + std::to_string(chunk), bytes));
        item.parts.push_back({payloads_.back().get(), StreamAccess::kUpdate});
      }
      items_.push_back(std::move(item));
    }
    ring_.resize(ChunkStream::ring_bytes(items_, 3, space_->alignment()));
    reference_.resize(payloads_.size());
    store_initial();
  }

  [[nodiscard]] std::unique_ptr<TransferQueue> make_queue(std::vector<IoFault> faults = {},
                                                          std::size_t depth = 8) const {
    return std::make_unique<TransferQueue>(
        std::make_unique<FaultyIoEngine>(
            make_io_engine(GetParam().engine, space_->io_files(), depth), std::move(faults)),
        space_->transfer_files(), kBlock);
  }

  [[nodiscard]] ChunkStream make_stream(TransferQueue& queue, std::size_t num_slots = 3,
                                        Verification verification = Verification::kOn) {
    return {queue, executor_,
            std::span(ring_).first(ChunkStream::ring_bytes(items_, num_slots, space_->alignment())),
            space_->alignment(), verification};
  }

  [[nodiscard]] std::vector<StreamItem> items_with(StreamAccess access) const {
    std::vector<StreamItem> items = items_;
    for (StreamItem& item : items) {
      for (StreamItem::Part& part : item.parts) {
        part.access = access;
      }
    }
    return items;
  }

  void store_initial() {
    const auto queue = make_queue();
    ChunkStream stream = make_stream(*queue);
    StreamProgress progress;
    stream.process(
        items_with(StreamAccess::kWrite),
        [&](std::size_t item, std::span<const std::span<std::byte>> payloads) {
          for (std::size_t part = 0; part < payloads.size(); ++part) {
            test::fill(payloads[part], item * kParts + part);
            reference_[item * kParts + part].assign(payloads[part].begin(), payloads[part].end());
          }
        },
        progress);
    ASSERT_TRUE(progress.complete());
  }

  static void update(std::span<std::byte> payload) {
    for (std::byte& value : payload) {
      value = static_cast<std::byte>(static_cast<unsigned>(value) * 5 + 1);
    }
  }

  /// One step: every payload is updated, and the reference too if `and_reference`.
  void step(ChunkStream& stream, StreamProgress& progress) {
    stream.process(
        items_,
        [](std::size_t, std::span<const std::span<std::byte>> payloads) {
          for (const std::span<std::byte> payload : payloads) {
            update(payload);
          }
        },
        progress);
  }

  void update_reference() {
    for (auto& payload : reference_) {
      update(payload);
    }
  }

  /// Chunks of which what is on NVMe is the reference.
  [[nodiscard]] std::vector<bool> matches(const std::vector<std::vector<std::byte>>& reference) {
    std::vector<bool> found(kChunks, true);
    const auto queue = make_queue();
    ChunkStream stream = make_stream(*queue);
    StreamProgress progress;
    stream.process(
        items_with(StreamAccess::kRead),
        [&](std::size_t item, std::span<const std::span<std::byte>> payloads) {
          for (std::size_t part = 0; part < payloads.size(); ++part) {
            found[item] =
                found[item] && test::equal(payloads[part], reference[item * kParts + part]);
          }
        },
        progress);
    return found;
  }

  void expect_all_match() { EXPECT_EQ(matches(reference_), std::vector<bool>(kChunks, true)); }

  test::SerialExecutor executor_;
  std::unique_ptr<ScratchSpace> space_;
  std::vector<std::unique_ptr<StoredPayload>> payloads_;
  std::vector<StreamItem> items_;
  std::vector<std::byte> ring_;
  std::vector<std::vector<std::byte>> reference_;
};

TEST_P(ChunkStreamTest, StepsUpdateEveryByteWithAnyNumberOfSlots) {
  for (const std::size_t num_slots : {1, 2, 3}) {
    for (const Verification verification : {Verification::kOn, Verification::kOff}) {
      const auto queue = make_queue();
      ChunkStream stream = make_stream(*queue, num_slots, verification);
      EXPECT_EQ(stream.num_slots(items_), num_slots);
      StreamProgress progress;
      step(stream, progress);
      step(stream, progress);
      update_reference();
      update_reference();
      EXPECT_TRUE(progress.complete());
      EXPECT_FALSE(progress.broken());
      expect_all_match();
    }
  }
}

TEST_P(ChunkStreamTest, ReadWorkAndWriteGoOnAtOnce) {
  const auto queue = make_queue();
  ring_.resize(ChunkStream::ring_bytes(items_, 4, space_->alignment()));
  ChunkStream stream(*queue, executor_, ring_, space_->alignment(), Verification::kOn);
  EXPECT_EQ(stream.num_slots(items_), 4U);
  StreamProgress progress;
  std::vector<std::byte*> places;
  stream.process(
      items_,
      [&](std::size_t item, std::span<const std::span<std::byte>> payloads) {
        places.push_back(payloads[0].data());
        // Its slot is no slot that is being read into or written from: the two items around it.
        EXPECT_EQ(progress.items[item], ItemProgress::kStarted);
        for (std::size_t after = item + 1; after < kChunks; ++after) {
          EXPECT_EQ(progress.items[after], ItemProgress::kUntouched);
        }
        for (const auto payload : payloads) {
          update(payload);
        }
      },
      progress);
  for (std::size_t i = 1; i < places.size(); ++i) {
    EXPECT_NE(places[i], places[i - 1]);
  }
  update_reference();
  expect_all_match();
}

TEST_P(ChunkStreamTest, ARingThatHoldsNoChunkIsRefusedBeforeAnythingChanges) {
  const auto queue = make_queue();
  ChunkStream stream(*queue, executor_, std::span(ring_).first(8192), space_->alignment(),
                     Verification::kOn);
  StreamProgress progress;
  EXPECT_THROW(step(stream, progress), InvalidArgument);
  EXPECT_TRUE(progress.unchanged());
  EXPECT_FALSE(progress.broken());
  stream.process(
      {}, [](auto, auto) {}, progress);
  EXPECT_TRUE(progress.complete());
}

TEST_P(ChunkStreamTest, RetriedFaultsChangeNoBit) {
  const std::vector<IoFault> harmless[] = {{{IoFault::Kind::kErrno, EINTR, 2, 5}},
                                           {{IoFault::Kind::kErrno, EAGAIN, 9, 20}},
                                           {{IoFault::Kind::kShort, 4096, 0, 30}},
                                           {{IoFault::Kind::kShort, 1, 5, 30}},
                                           {{IoFault::Kind::kDelay, 6, 3, 4}}};
  for (const auto& faults : harmless) {
    const auto queue = make_queue(faults);
    ChunkStream stream = make_stream(*queue);
    StreamProgress progress;
    step(stream, progress);
    update_reference();
    expect_all_match();
  }
}

// The heart of it: whatever operation fails in whatever way, the step either says so, and
// `progress` says truly which chunks are new and which are old, or its result is that of a step
// without faults.
TEST_P(ChunkStreamTest, AFaultAtEveryOperationIsNeverSilent) {
  std::uint64_t num_operations = 0;
  {
    auto engine = std::make_unique<FaultyIoEngine>(
        make_io_engine(GetParam().engine, space_->io_files(), 8), std::vector<IoFault>{});
    const FaultyIoEngine& counter = *engine;
    TransferQueue queue(std::move(engine), space_->transfer_files(), kBlock);
    ChunkStream stream = make_stream(queue);
    StreamProgress progress;
    step(stream, progress);
    update_reference();
    num_operations = counter.counts().reads + counter.counts().writes;
  }
  ASSERT_GT(num_operations, 30U);
  const IoFault kinds[] = {{IoFault::Kind::kErrno, EIO},
                           {IoFault::Kind::kErrno, ENOSPC},
                           {IoFault::Kind::kShort, 4096},
                           {IoFault::Kind::kBitFlip}};
  std::size_t num_named = 0;
  std::size_t num_broken = 0;
  for (IoFault fault : kinds) {
    for (fault.first = 0; fault.first < num_operations; ++fault.first) {
      bool failed = false;
      StreamProgress progress;
      {
        const auto queue = make_queue({fault});
        ChunkStream stream = make_stream(*queue);
        try {
          step(stream, progress);
        } catch (const CorruptionError& error) {
          failed = true;
          EXPECT_EQ(fault.kind, IoFault::Kind::kBitFlip);
          EXPECT_NE(std::string(error.what()).find(" of chunk "), std::string::npos);
          EXPECT_EQ(error.error_number(), EBADMSG);
          EXPECT_NE(error.expected(), error.found());
        } catch (const IoError& error) {
          failed = true;
          EXPECT_EQ(fault.kind, IoFault::Kind::kErrno);
          EXPECT_EQ(error.error_number(), static_cast<int>(fault.value));
        }
      }
      if (!failed) {
        ASSERT_NE(fault.kind, IoFault::Kind::kErrno);
        ASSERT_TRUE(progress.complete());
        update_reference();
        // A bit that flips on its way to the device is found when it is read again.
        if (fault.kind == IoFault::Kind::kBitFlip) {
          try {
            expect_all_match();
          } catch (const CorruptionError&) {
            ++num_named;
            store_initial();
          }
        } else {
          expect_all_match();
        }
        continue;
      }
      ++num_named;
      ASSERT_FALSE(progress.complete());
      num_broken += progress.broken() ? 1 : 0;
      // Every chunk is what progress says, or, where it says half-way, refuses to be read.
      const auto before = reference_;
      auto after = reference_;
      for (auto& payload : after) {
        update(payload);
      }
      for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
        if (progress.items[chunk] == ItemProgress::kStarted) {
          continue;
        }
        const auto& wanted = progress.items[chunk] == ItemProgress::kDone ? after : before;
        const auto queue = make_queue();
        ChunkStream stream = make_stream(*queue);
        StreamProgress ignored;
        auto item = items_with(StreamAccess::kRead)[chunk];
        stream.process(
            {&item, 1},
            [&](std::size_t, std::span<const std::span<std::byte>> payloads) {
              for (std::size_t part = 0; part < kParts; ++part) {
                EXPECT_TRUE(test::equal(payloads[part], wanted[chunk * kParts + part]));
              }
            },
            ignored);
      }
      store_initial();  // a checkpoint is loaded
    }
  }
  // EIO, ENOSPC and a flipped bit, at every operation; short transfers were all continued.
  EXPECT_EQ(num_named, 3 * num_operations);
  EXPECT_GT(num_broken, num_operations);
}

TEST_P(ChunkStreamTest, ATornPayloadRefusesToBeRead) {
  // With 1 slot and depth 1 the first write comes after the reads of the first chunk.
  const auto queue = make_queue({{IoFault::Kind::kErrno, EIO, kParts}}, 1);
  ChunkStream stream = make_stream(*queue, 1);
  StreamProgress progress;
  EXPECT_THROW(step(stream, progress), IoError);
  EXPECT_EQ(progress.items[0], ItemProgress::kStarted);
  EXPECT_EQ(payloads_[0]->contents(), PayloadContents::kTorn);
  EXPECT_TRUE(progress.broken());
  EXPECT_EQ(progress.summary(), "0 of 5 chunks are updated, 1 half-way, 4 as before");
  try {
    step(stream, progress);
    FAIL() << "a torn payload was read";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "part 0 of chunk 0 is half-written on NVMe, because its last write failed: load a "
                 "checkpoint");
  }
  EXPECT_TRUE(progress.unchanged());
}

TEST_P(ChunkStreamTest, AnErrorOfTheWorkEndsThePassAndKeepsWhatWasWritten) {
  const auto queue = make_queue();
  ChunkStream stream = make_stream(*queue);
  StreamProgress progress;
  EXPECT_THROW(stream.process(
                   items_,
                   [](std::size_t item, std::span<const std::span<std::byte>> payloads) {
                     if (item == 3) {
                       throw UsageError("the work failed");
                     }
                     for (const auto payload : payloads) {
                       update(payload);
                     }
                   },
                   progress),
               UsageError);
  EXPECT_EQ(progress.summary(), "3 of 5 chunks are updated, 1 half-way, 1 as before");
  auto expected = reference_;
  for (std::size_t i = 0; i < 3 * kParts; ++i) {
    update(expected[i]);
  }
  EXPECT_EQ(matches(expected), std::vector<bool>(kChunks, true));
}

TEST_P(ChunkStreamTest, WhatSomebodyElseChangedInTheFileIsFoundAndNamed) {
  const auto pieces = space_->pieces(0, std::span(ring_).first(4096));
  const std::string path = space_->files()[0].file().path();
  {
    std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
    const std::uint64_t place = pieces[0].offset + 1'000;
    // Chunk 0 is 1 byte long; what lies here is part 1 of chunk 0.
    stream.seekp(static_cast<std::streamoff>(place));
    char byte = 0;
    stream.read(&byte, 1);
    byte = static_cast<char>(byte ^ 1);
    stream.seekp(static_cast<std::streamoff>(place + 4096));
    stream.write(&byte, 1);
  }
  const auto queue = make_queue();
  ChunkStream stream = make_stream(*queue);
  StreamProgress progress;
  try {
    step(stream, progress);
    FAIL() << "the damage was not seen";
  } catch (const CorruptionError& error) {
    EXPECT_EQ(error.path(), path);
    EXPECT_EQ(error.offset(), pieces[0].offset + 4096);
    EXPECT_NE(std::string(error.what()).find("part 1 of chunk 0 (its byte 0)"), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(progress.unchanged());
}

TEST_P(ChunkStreamTest, UnwrittenPayloadsAndEmptyOnesAreRefused) {
  StoredPayload fresh(*space_, "exp_avg of chunk 99", 100);
  StreamItem item{{{&fresh, StreamAccess::kUpdate}}};
  const auto queue = make_queue();
  ChunkStream stream = make_stream(*queue);
  StreamProgress progress;
  EXPECT_THROW(stream.process(
                   {&item, 1}, [](auto, auto) {}, progress),
               UsageError);
  EXPECT_TRUE(progress.unchanged());
  EXPECT_THROW(StoredPayload(*space_, "nothing", 0), InvalidArgument);
  EXPECT_THROW(StoredPayload(*space_, "too much", 17 * kMiB), OutOfMemory);
}

INSTANTIATE_TEST_SUITE_P(Every, ChunkStreamTest, ::testing::ValuesIn(test::every_place()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace castor
