// One engine's bandwidth on a file that exists: benchmarks/io.py runs it in turn with fio. With
// "stream" instead of a mix it runs what an optimizer step does: every byte of the range is read
// and written back through a ring of three slots, checksummed, with nothing to compute.
//
//   io_engine FILE ENGINE MIX BLOCK_BYTES DEPTH BYTES SECONDS
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "core/units.h"
#include "io/aligned_buffer.h"
#include "io/chunk_stream.h"
#include "io/io_measure.h"
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
  ScratchSpace space(
      {.directories = {std::filesystem::path(path).parent_path().string()}, .bytes = bytes});
  std::vector<StoredPayload> payloads;
  for (std::uint64_t done = 0; done + kPayloadBytes <= bytes; done += kPayloadBytes) {
    payloads.emplace_back(space, "payload at " + std::to_string(done), kPayloadBytes);
  }
  std::vector<StreamItem> items;
  for (StoredPayload& payload : payloads) {
    items.push_back({{{&payload, StreamAccess::kWrite}}});
  }
  AlignedBuffer ring(ChunkStream::ring_bytes(items, 3, space.alignment()), kIoAlignment);
  const std::span<std::byte> buffers[] = {ring.span()};
  TransferQueue queue(make_io_engine(kind, space.io_files(), depth, buffers),
                      space.transfer_files(), block_bytes);
  ThreadExecutor executor;
  ChunkStream stream(queue, executor, ring.span(), space.alignment(), Verification::kOn);
  StreamProgress progress;
  const auto nothing = [](std::size_t, std::span<const std::span<std::byte>>) {};
  stream.process(items, nothing, progress);
  for (StreamItem& item : items) {
    item.parts.front().access = StreamAccess::kUpdate;
  }
  IoMeasurement found{.engine = queue.description() + ", stream"};
  const auto start = std::chrono::steady_clock::now();
  do {
    stream.process(items, nothing, progress);
    found.read_bytes += payloads.size() * kPayloadBytes;
    found.written_bytes += payloads.size() * kPayloadBytes;
    found.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  } while (found.seconds < seconds);
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
