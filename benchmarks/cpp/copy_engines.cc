// Question: how near do castor's CPU copy engines come to memcpy, and does an emulated link keep
//     its rate?
// Baseline: memcpy, on one thread (what one direction of the asynchronous engine has) and on as
//     many threads as there are cores, each with a stripe of its own (what torch's kernel has).
// Method: a buffer of the host tier's arena is copied to another one in pieces of one size, so that
//     small pieces do not stay in the caches; the contenders take turns in rotating order.
//
//   copy_engines BUFFER_BYTES PIECE_BYTES REPETITIONS LINK_BYTES_PER_SECOND
//
// prints one JSON object: seconds of each contender for the whole buffer. LINK_BYTES_PER_SECOND 0
// leaves the link out.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/memory_tier.h"
#include "host/host_arena.h"
#include "parallel/async_copy_engine.h"
#include "parallel/cores.h"
#include "parallel/immediate_copy_engine.h"
#include "parallel/tbb_executor.h"
#include "torch/chunk_storages.h"

namespace {

using castor::CopyDirection;
using castor::CopyEngine;
using castor::CopyTicket;

struct Contender {
  std::string name;
  std::function<void()> copy_all;
  std::vector<double> seconds;
};

/// The two buffers and the pieces they are copied in.
class Job {
 public:
  Job(std::size_t buffer_bytes, std::size_t piece_bytes)
      : piece_bytes_(piece_bytes),
        num_pieces_(buffer_bytes / piece_bytes),
        host_(castor::TierKind::kHost, 2 * buffer_bytes, castor::make_host_arena()),
        source_(host_.allocate(buffer_bytes, "")),
        target_(host_.allocate(buffer_bytes, "")) {
    for (std::size_t i = 0; i < buffer_bytes; i += sizeof(std::uint64_t)) {
      const std::uint64_t word = i * 0x9e3779b97f4a7c15u;
      std::memcpy(source_.data() + i, &word, sizeof(word));
    }
    clear();
  }

  std::size_t bytes() const { return num_pieces_ * piece_bytes_; }
  std::size_t num_pieces() const { return num_pieces_; }
  std::string arena() const { return host_.description(); }
  void clear() { std::memset(target_.data(), 0, target_.bytes()); }
  bool copied() const { return std::memcmp(source_.data(), target_.data(), bytes()) == 0; }

  void copy_plainly(std::size_t piece) const {
    std::memcpy(target_.data() + piece * piece_bytes_, source_.data() + piece * piece_bytes_,
                piece_bytes_);
  }
  castor::CopyRequest request(std::size_t piece, CopyDirection direction) const {
    return {.source = {source_.data() + piece * piece_bytes_, piece_bytes_},
            .target = {target_.data() + piece * piece_bytes_, piece_bytes_},
            .direction = direction};
  }

 private:
  const std::size_t piece_bytes_;
  const std::size_t num_pieces_;
  castor::MemoryTier host_;
  const castor::Block source_;
  const castor::Block target_;
};

void copy_in_turn(const Job& job, CopyEngine& engine) {
  for (std::size_t i = 0; i < job.num_pieces(); ++i) {
    engine.wait(engine.submit(job.request(i, CopyDirection::kHostToDevice)));
  }
}

void copy_queued(const Job& job, CopyEngine& engine) {
  CopyTicket last = CopyTicket::kNone;
  for (std::size_t i = 0; i < job.num_pieces(); ++i) {
    last = engine.submit(job.request(i, CopyDirection::kHostToDevice));
  }
  engine.wait(last);
}

void copy_both_ways(const Job& job, CopyEngine& engine) {
  CopyTicket last[2] = {CopyTicket::kNone, CopyTicket::kNone};
  for (std::size_t i = 0; i < job.num_pieces(); ++i) {
    const auto direction = i % 2 == 0 ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost;
    last[i % 2] = engine.submit(job.request(i, direction));
  }
  engine.wait(last[0]);
  engine.wait(last[1]);
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int measure(std::size_t buffer_bytes, std::size_t piece_bytes, std::size_t repetitions,
            std::uint64_t link_bytes_per_second) {
  Job job(buffer_bytes, piece_bytes);
  castor::TbbExecutor executor;
  castor::ImmediateCopyEngine torch([](const castor::CopyRequest& request) {
    castor::copy_on_cpu(request.source, request.target.data());
  });
  castor::AsyncCopyEngine async;
  const std::size_t num_threads = castor::num_available_cores();

  std::vector<Contender> contenders;
  contenders.push_back({"memcpy",
                        [&] {
                          for (std::size_t i = 0; i < job.num_pieces(); ++i) {
                            job.copy_plainly(i);
                          }
                        },
                        {}});
  contenders.push_back({"memcpy_striped",
                        [&] {
                          executor.parallel_for(num_threads, [&](std::size_t stripe) {
                            const std::size_t end = job.num_pieces() * (stripe + 1) / num_threads;
                            for (std::size_t i = job.num_pieces() * stripe / num_threads; i < end;
                                 ++i) {
                              job.copy_plainly(i);
                            }
                          });
                        },
                        {}});
  contenders.push_back({"torch", [&] { copy_in_turn(job, torch); }, {}});
  contenders.push_back({"async_in_turn", [&] { copy_in_turn(job, async); }, {}});
  contenders.push_back({"async_queued", [&] { copy_queued(job, async); }, {}});
  contenders.push_back({"async_both_ways", [&] { copy_both_ways(job, async); }, {}});
  std::unique_ptr<castor::AsyncCopyEngine> link;
  if (link_bytes_per_second > 0) {
    link = std::make_unique<castor::AsyncCopyEngine>(
        castor::AsyncCopyOptions{.bytes_per_second = link_bytes_per_second, .copy = {}});
    contenders.push_back({"link", [&] { copy_queued(job, *link); }, {}});
  }

  for (std::size_t repetition = 0; repetition <= repetitions; ++repetition) {
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      Contender& contender = contenders[(i + repetition) % contenders.size()];
      const double seconds = seconds_of(contender.copy_all);
      if (repetition > 0) {  // the first one wakes the threads
        contender.seconds.push_back(seconds);
      }
    }
  }
  // Verified after timing: each one copies every byte.
  for (const Contender& contender : contenders) {
    job.clear();
    contender.copy_all();
    if (!job.copied()) {
      std::fprintf(stderr, "copy_engines: %s did not copy everything\n", contender.name.c_str());
      return 1;
    }
  }

  std::printf("{\"bytes\": %zu, \"piece_bytes\": %zu, \"threads\": %zu, \"arena\": \"%s\"",
              job.bytes(), piece_bytes, num_threads, job.arena().c_str());
  std::printf(", \"link_bytes_per_second\": %llu, \"seconds\": {",
              static_cast<unsigned long long>(link_bytes_per_second));
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    std::printf("%s\"%s\": [", i == 0 ? "" : ", ", contenders[i].name.c_str());
    for (std::size_t j = 0; j < contenders[i].seconds.size(); ++j) {
      std::printf("%s%.9f", j == 0 ? "" : ", ", contenders[i].seconds[j]);
    }
    std::printf("]");
  }
  std::printf("}}\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto count = [&](int i) {
    return argc > i ? static_cast<std::size_t>(std::atoll(argv[i])) : 0;
  };
  if (argc != 5 || count(2) < sizeof(std::uint64_t) || count(2) > count(1) || count(3) < 1 ||
      count(1) % sizeof(std::uint64_t) != 0) {
    std::fprintf(stderr,
                 "usage: copy_engines BUFFER_BYTES PIECE_BYTES REPETITIONS "
                 "LINK_BYTES_PER_SECOND\n");
    return 2;
  }
  try {
    return measure(count(1), count(2), count(3), count(4));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "copy_engines: %s\n", error.what());
    return 1;
  }
}
