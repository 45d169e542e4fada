// One engine's bandwidth on a file that exists: benchmarks/io.py runs it in turn with fio. With
// "stream" instead of a mix it runs what an optimizer step does: every byte of the range is read
// and written back through a window of three slots, checksummed, with nothing to compute.
//
//   io_engine FILE ENGINE MIX BLOCK_BYTES DEPTH BYTES SECONDS
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/units.h"
#include "host/host_arena.h"
#include "io/io_measure.h"
#include "io/nvme_tier.h"
#include "parallel/thread_executor.h"

namespace castor {
namespace {

void print(const IoMeasurement& found) {
  std::printf(
      "{\"read_bytes\": %llu, \"written_bytes\": %llu, \"seconds\": %.6f, \"engine\": \"%s\"}\n",
      static_cast<unsigned long long>(found.read_bytes),
      static_cast<unsigned long long>(found.written_bytes), found.seconds, found.engine.c_str());
}

/// Passes over `bytes` of payloads in a scratch file beside `path`, until the time is over.
IoMeasurement stream(IoEngineKind kind, const std::string& path, std::size_t block_bytes,
                     std::size_t depth, std::uint64_t bytes, double seconds) {
  constexpr std::size_t kPayloadBytes = 16 * kMiB;
  const std::size_t num_chunks = bytes / kPayloadBytes;
  const NvmeContent content{
      .name = "payloads",
      .chunks = std::vector(num_chunks, std::vector<PayloadSpec>{{"payload", kPayloadBytes}}),
      .num_slots = 3};
  MemoryTier host(TierKind::kHost, 4 * kPayloadBytes, make_host_arena());
  ThreadExecutor executor;
  NvmeTier tier({.directories = {std::filesystem::path(path).parent_path().string()},
                 .budget_bytes = bytes,
                 .engine = kind,
                 .block_bytes = block_bytes,
                 .depth = depth},
                {&content, 1}, host, executor);
  ChunkStream& stream = *tier.stream(0);
  const auto pass = [&](const ChunkStream::Work& work) {
    for (std::size_t i = 0; i < num_chunks; ++i) {
      for (std::size_t j = i; j <= std::min(i + stream.max_ahead(), num_chunks - 1); ++j) {
        stream.prefetch(j);
      }
      stream.use(i, StreamAccess::kUpdate, work);
    }
    stream.flush();
  };
  // Storage may be faster with zeros than with what an optimizer keeps.
  std::mt19937_64 random(1);
  pass([&random](std::span<const std::span<std::byte>> payloads) {
    for (std::size_t i = 0; i < payloads[0].size(); i += sizeof(std::uint64_t)) {
      const std::uint64_t value = random();
      std::memcpy(&payloads[0][i], &value, sizeof(value));
    }
  });
  IoMeasurement found{.engine = tier.description() + ", stream"};
  const ChunkStream::Counts before = stream.counts();
  const auto start = std::chrono::steady_clock::now();
  do {
    pass([](std::span<const std::span<std::byte>>) {});
    found.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  } while (found.seconds < seconds);
  found.read_bytes = stream.counts().read_bytes - before.read_bytes;
  found.written_bytes = stream.counts().written_bytes - before.written_bytes;
  return found;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() != 7) {
    std::fprintf(stderr,
                 "usage: io_engine FILE ENGINE MIX|stream BLOCK_BYTES DEPTH BYTES SECONDS\n");
    return 2;
  }
  const IoEngineKind kind = parse_io_engine_kind(arguments[1]);
  const std::size_t block_bytes = std::stoull(arguments[3]);
  const std::size_t depth = std::stoull(arguments[4]);
  const std::uint64_t bytes = std::stoull(arguments[5]);
  const double seconds = std::stod(arguments[6]);
  if (arguments[2] == "stream") {
    print(stream(kind, arguments[0], block_bytes, depth, bytes, seconds));
    return 0;
  }
  const DirectFile file(arguments[0], FileAccess::kReadWrite);
  print(measure_io(kind, file,
                   {.mix = parse_io_mix(arguments[2]),
                    .block_bytes = block_bytes,
                    .depth = depth,
                    .bytes = bytes,
                    .seconds = seconds}));
  return 0;
}

}  // namespace
}  // namespace castor

int main(int argc, char** argv) {
  try {
    return castor::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "io_engine: %s\n", error.what());
    return 1;
  }
}
