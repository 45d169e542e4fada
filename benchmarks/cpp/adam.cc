// Question: what does Adam cost a core by itself, with memory out of the way? Where that is more
//     than the bytes take, a format is bound by computing.
// Baseline: the time that its bytes take (benchmarks/adam.py measures the bandwidth).
// Method: one thread updates the same elements again and again; they fit its second-level cache.
//     Arrays begin on pages, as payloads do. Formats and instruction sets take turns.
//
//   adam NUMEL REPETITIONS
//
// prints one JSON object: ns per 16 elements, of each repetition, by instruction set and format.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "io/aligned_buffer.h"
#include "optim/adam.h"
#include "optim/isa.h"
#include "optim/rounding.h"
#include "parallel/thread_executor.h"

namespace {

using castor::AdamSegment;
using castor::Isa;
using castor::ScalarType;
using castor::StateFormat;

/// Begins on a page: std::vector's memory begins in the middle of cache lines.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t count) : memory_(count * sizeof(T), kPage) {}
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }

 private:
  static constexpr std::size_t kPage = 4096;
  castor::AlignedBuffer memory_;
};

/// The arrays of one bf16 parameter; of a segment, those that its format has.
class Parameter {
 public:
  Parameter(StateFormat format, std::size_t numel)
      : format_(format),
        numel_(numel),
        param_(numel),
        grad_(numel),
        remainder_(numel),
        master_(numel),
        exp_avg_(numel),
        exp_avg_sq_(numel),
        scales_(castor::num_moment_blocks(numel)) {
    std::mt19937 random(0);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel; ++i) {
      param_.data()[i] = castor::round_to_bfloat16(normal(random));
      grad_.data()[i] = castor::round_to_bfloat16(normal(random));
      master_.data()[i] = castor::from_bfloat16(param_.data()[i]);
    }
  }

  AdamSegment segment(std::int64_t step) {
    AdamSegment segment{.coefficients = {castor::AdamOptions{.weight_decay = 0.01}, step, 1.0}};
    segment.type = ScalarType::kBFloat16;
    segment.format = format_;
    segment.numel = numel_;
    segment.param = param_.data();
    segment.grad = grad_.data();
    segment.exp_avg = exp_avg_.data();
    segment.exp_avg_sq = exp_avg_sq_.data();
    const castor::StateBytes state = castor::state_bytes(format_);
    segment.master = state.master > 0 ? master_.data() : nullptr;
    segment.remainder = state.remainder > 0 ? remainder_.data() : nullptr;
    segment.scales = format_ == StateFormat::kSplitInt8 ? scales_.data() : nullptr;
    segment.rounding = castor::RoundingKey(0, 0, step);
    return segment;
  }

 private:
  StateFormat format_;
  std::size_t numel_;
  Array<std::uint16_t> param_;
  Array<std::uint16_t> grad_;
  Array<std::int16_t> remainder_;
  Array<float> master_;
  Array<float> exp_avg_;  // narrower moments take its beginning
  Array<float> exp_avg_sq_;
  Array<castor::MomentScales> scales_;
};

struct Contender {
  Isa isa;
  Parameter parameter;
  std::string format;
  std::vector<double> nanoseconds;  // per 16 elements
};

double nanoseconds_of(Contender& contender, std::size_t numel, std::int64_t* step) {
  constexpr std::size_t kCalls = 50;
  castor::ThreadExecutor executor(1);  // the calling thread
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < kCalls; ++i) {
    const AdamSegment segment = contender.parameter.segment(++*step);
    castor::detail::adam_update(executor, {&segment, 1}, contender.isa);
  }
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  return 16 * elapsed.count() / static_cast<double>(kCalls * numel);
}

int measure(std::size_t numel, std::size_t repetitions) {
  std::vector<Contender> contenders;
  for (const Isa isa : castor::supported_isas()) {
    for (const StateFormat format : {StateFormat::kFp32, StateFormat::kSplit,
                                     StateFormat::kSplitBf16, StateFormat::kSplitInt8}) {
      contenders.push_back(
          {isa, Parameter(format, numel), std::string(castor::to_string(format)), {}});
    }
  }
  std::int64_t step = 0;
  for (std::size_t repetition = 0; repetition <= repetitions; ++repetition) {
    for (Contender& contender : contenders) {
      const double nanoseconds = nanoseconds_of(contender, numel, &step);
      if (repetition > 0) {  // the first one touches the pages
        contender.nanoseconds.push_back(nanoseconds);
      }
    }
  }
  std::printf("{\"numel\": %zu, \"ns_per_16\": [", numel);
  for (const Contender& contender : contenders) {
    std::printf("%s{\"isa\": \"%s\", \"format\": \"%s\", \"ns\": [",
                &contender == contenders.data() ? "" : ", ",
                std::string(castor::to_string(contender.isa)).c_str(), contender.format.c_str());
    for (std::size_t i = 0; i < repetitions; ++i) {
      std::printf("%s%.3f", i == 0 ? "" : ", ", contender.nanoseconds[i]);
    }
    std::printf("]}");
  }
  std::printf("]}\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto count = [&](int i) {
    return argc == 3 ? static_cast<std::size_t>(std::atoll(argv[i])) : 0;
  };
  if (count(1) < 1 || count(2) < 1) {
    std::fprintf(stderr, "usage: adam NUMEL REPETITIONS\n");
    return 2;
  }
  try {
    return measure(count(1), count(2));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "adam: %s\n", error.what());
    return 1;
  }
}
