#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/units.h"
#include "io/chunk_stream.h"
#include "io/fault_injection.h"
#include "io/scratch_space.h"
#include "io/test_support.h"

// A chunk stream on every kind of engine and file system: chunks of odd sizes, known contents.
namespace castor::test {

inline constexpr std::size_t kBlock = 64 * kKiB;
inline constexpr std::size_t kChunks = 5;
inline constexpr std::size_t kParts = 2;

using Contents = std::vector<std::vector<std::byte>>;  // of every part of every chunk
using Payloads = std::span<const std::span<std::byte>>;

inline void change(std::span<std::byte> payload) {
  for (std::byte& value : payload) {
    value = static_cast<std::byte>(static_cast<unsigned>(value) * 5 + 1);
  }
}

inline Contents changed(Contents contents) {
  for (auto& payload : contents) {
    change(payload);
  }
  return contents;
}

inline void change_all(Payloads payloads) {
  for (const std::span<std::byte> payload : payloads) {
    change(payload);
  }
}

/// What a stream stands on.
struct Bench {
  Bench(ScratchSpace& space, std::unique_ptr<IoEngine> engine, std::size_t num_slots,
        Verification verification)
      : queue(std::move(engine), space.transfer_files(), kBlock) {
    std::vector<StoredChunk> chunks(kChunks);
    std::size_t largest = 0;
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      std::size_t bytes = 0;
      for (std::size_t part = 0; part < kParts; ++part) {
        // Odd sizes, smaller and larger than a stripe, different in every chunk.
        chunks[chunk].emplace_back(
            space, "part " + std::to_string(part) + " of chunk " + std::to_string(chunk),
            1 + chunk * 40'000 + part * 3'333);
        bytes += chunks[chunk].back().padded_bytes();
      }
      largest = std::max(largest, bytes);
    }
    memory.resize(ChunkStream::memory_bytes(largest, num_slots, space.alignment()));
    stream.emplace(std::move(chunks), queue, executor, memory, space.alignment(), verification,
                   num_slots);
  }

  SerialExecutor executor;
  std::vector<std::byte> memory;
  TransferQueue queue;
  std::optional<ChunkStream> stream;
};

/// Writes contents of its own to every chunk, in small edits.
inline Contents store(ChunkStream& stream) {
  Contents contents;
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    for (std::size_t part = 0; part < kParts; ++part) {
      stream.use(chunk, StreamAccess::kEdit, [&](Payloads payloads) {
        fill(payloads[part], chunk * kParts + part);
        contents.emplace_back(payloads[part].begin(), payloads[part].end());
      });
    }
  }
  stream.flush();
  return contents;
}

inline bool equal(Payloads payloads, std::size_t chunk, const Contents& contents) {
  for (std::size_t part = 0; part < kParts; ++part) {
    if (!equal(payloads[part], contents[chunk * kParts + part])) {
      return false;
    }
  }
  return true;
}

inline bool matches(ChunkStream& stream, std::size_t chunk, const Contents& contents) {
  bool all_equal = true;
  stream.use(chunk, StreamAccess::kRead,
             [&](Payloads payloads) { all_equal = equal(payloads, chunk, contents); });
  return all_equal;
}

inline void expect_all(ChunkStream& stream, const Contents& contents) {
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    EXPECT_TRUE(matches(stream, chunk, contents)) << "chunk " << chunk;
  }
}

class StreamPlaceTest : public PlaceTest {
 protected:
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
  }

  [[nodiscard]] std::unique_ptr<Bench> make_bench(std::vector<IoFault> faults = {},
                                                  std::size_t num_slots = 3,
                                                  Verification verification = Verification::kOn,
                                                  std::size_t depth = 8) {
    auto engine = std::make_unique<FaultyIoEngine>(
        make_io_engine(GetParam().engine, space_->io_files(), depth), std::move(faults));
    engine_ = engine.get();
    return std::make_unique<Bench>(*space_, std::move(engine), num_slots, verification);
  }

  [[nodiscard]] std::uint64_t num_operations() const {
    return engine_->counts().reads + engine_->counts().writes;
  }

  std::unique_ptr<ScratchSpace> space_;
  FaultyIoEngine* engine_ = nullptr;  // of the last bench
};

}  // namespace castor::test
