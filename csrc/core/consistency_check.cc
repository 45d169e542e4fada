#include "core/consistency_check.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {
namespace {

constexpr double kNoGradients = 0.0;                  // in place of a loss scale
constexpr std::uint64_t kTheOne = ~std::uint64_t{0};  // in place of which of several optimizers

/// FNV-1a, of numbers.
class Digest {
 public:
  void add(std::uint64_t number) noexcept {
    for (int byte = 0; byte < 8; ++byte) {
      value_ = (value_ ^ ((number >> (8 * byte)) & 0xff)) * 0x100000001b3ull;
    }
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ull;
};

struct LayoutFacts {
  std::uint64_t num_params = 0;
  std::uint64_t num_chunks = 0;
  std::uint64_t chunk_bytes = 0;
  std::uint64_t digest = 0;

  bool operator==(const LayoutFacts&) const = default;
};

LayoutFacts facts_of(const ChunkLayout& layout) {
  Digest digest;
  for (const ChunkSpec& chunk : layout.chunks()) {
    digest.add(static_cast<std::uint64_t>(chunk.type));
    digest.add(chunk.trainable ? 1 : 0);
    digest.add(chunk.has_state ? 1 : 0);
    digest.add(chunk.used_bytes);
    for (const ParamId param : chunk.params) {
      digest.add(index(param));
      digest.add(layout.place(param).offset);
      digest.add(layout.param(param).numel);
    }
  }
  return {.num_params = layout.params().size(),
          .num_chunks = layout.chunks().size(),
          .chunk_bytes = layout.chunk_bytes(),
          .digest = digest.value()};
}

std::uint64_t digest_of(std::span<const WeightDigest> weights) {
  Digest digest;
  for (const WeightDigest& weight : weights) {
    digest.add(weight.value);
  }
  return digest.value();
}

std::string describe(const LayoutFacts& facts) {
  return std::to_string(facts.num_params) + " parameters in " + std::to_string(facts.num_chunks) +
         " chunks of " + std::to_string(facts.chunk_bytes) + " bytes";
}

// Of a chunk that was handed over nothing is fresh, unless its pass failed and another one ran.
void check_repeated(std::span<const std::byte> flags, std::size_t num_ranks,
                    std::size_t num_chunks) {
  const std::size_t each = flags.size() / num_ranks;
  const auto flag = [&](std::size_t rank, std::size_t i) {
    return flags[rank * each + i] != std::byte{0};
  };
  for (std::size_t i = 0; i < num_chunks; ++i) {
    std::optional<std::size_t> once, again;
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      if (flag(rank, num_chunks + i)) {
        (flag(rank, i) ? again : once) = rank;
      }
    }
    if (once && again) {
      throw UsageError(
          "a backward pass has failed on rank " + std::to_string(*again) + " and not on rank " +
          std::to_string(*once) +
          ", which had a part of its gradients by then: they cannot be taken back, and a second "
          "pass of rank " +
          std::to_string(*again) +
          " would count twice. Start again from the last checkpoint; a pass that may fail (a batch "
          "without room) runs under booster.no_sync, behind which ranks tell each other "
          "(torch.distributed.all_reduce) whether all run it again");
    }
  }
}

}  // namespace

GradientMarks::GradientMarks(const ChunkLayout& layout)
    : fresh(layout.chunks().size(), false),
      handed(layout.chunks().size(), false),
      present(layout.params().size(), false) {}

/// What a rank says when it arrives.
struct ConsistencyCheck::Header {
  enum class Point : std::uint8_t { kBackwardEnd, kStep, kLoad, kRead, kServe, kEndService };

  Point point = Point::kBackwardEnd;
  StateRequest request{};             // of kRead
  std::uint64_t optimizer = kTheOne;  // of kStep
  std::uint64_t steps = 0;
  std::uint64_t backwards = 0;
  double scale = kNoGradients;
  std::uint64_t weights = 0;  // a digest of all that this rank has updated by itself

  [[nodiscard]] bool of_states() const noexcept { return point >= Point::kRead; }
  [[nodiscard]] bool agrees_with(const Header& other) const noexcept {
    if (of_states() && other.of_states()) {
      return point == Point::kServe || other.point == Point::kServe ||
             (point == other.point && request == other.request);
    }
    return point == other.point && optimizer == other.optimizer && steps == other.steps &&
           backwards == other.backwards;
  }
};

ConsistencyCheck::ConsistencyCheck(Collectives& ranks, const ChunkLayout& layout)
    : ranks_(ranks), layout_(layout) {
  const LayoutFacts own = facts_of(layout);
  const std::vector<LayoutFacts> all = gather(ranks, own);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      throw UsageError("the ranks boost different models: rank 0 has " + describe(all[0]) +
                       ", rank " + std::to_string(rank) + " has " + describe(all[rank]) +
                       (all[0].digest == all[rank].digest ? "" : ", cut in another way") +
                       "; build the same model, with the same requires_grad, and give every rank "
                       "the same plugin");
    }
  }
}

std::string ConsistencyCheck::place_of(const Header& header) const {
  switch (header.point) {
    case Header::Point::kBackwardEnd:
      return "ends backward pass " + std::to_string(header.backwards + 1) + " of step " +
             std::to_string(header.steps + 1);
    case Header::Point::kStep:
      return "calls " +
             (header.optimizer == kTheOne
                  ? "optimizer"
                  : "optimizers[" + std::to_string(header.optimizer) + "]") +
             ".step() after " + std::to_string(header.backwards) + " backward passes, for step " +
             std::to_string(header.steps + 1);
    case Header::Point::kLoad: return "loads weights after step " + std::to_string(header.steps);
    case Header::Point::kRead:
      return "reads the optimizer state of parameter '" + layout_.param(header.request.param).name +
             "' after step " + std::to_string(header.steps);
    case Header::Point::kServe:
      return "takes part in a save after step " + std::to_string(header.steps);
    case Header::Point::kEndService:
      return "ends a save after step " + std::to_string(header.steps);
  }
  return "";
}

void ConsistencyCheck::check_same(const std::vector<Header>& headers) const {
  // One that serves agrees with all that read: the others are compared with one that does not.
  const auto active = std::find_if(headers.begin(), headers.end(), [](const Header& header) {
    return header.point != Header::Point::kServe;
  });
  const std::size_t first =
      active == headers.end() ? 0 : static_cast<std::size_t>(active - headers.begin());
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    if (!headers[first].agrees_with(headers[rank])) {
      throw UsageError(
          "the ranks do different things: rank " + std::to_string(std::min(first, rank)) + " " +
          place_of(headers[std::min(first, rank)]) + ", while rank " +
          std::to_string(std::max(first, rank)) + " " + place_of(headers[std::max(first, rank)]) +
          ". Every rank runs as many backward passes and steps as the others, leaves "
          "booster.no_sync at the same ones, and loads weights and reads optimizer states "
          "(optimizer.state, state_dict, saves) when they do");
    }
  }
}

// All ranks see the same headers: where two differ all say which parameters they have updated.
void ConsistencyCheck::check_weights(const std::vector<Header>& headers) {
  const auto other = std::find_if(headers.begin(), headers.end(), [&](const Header& header) {
    return header.weights != headers[0].weights;
  });
  if (other == headers.end()) {
    return;
  }
  std::vector<WeightDigest> all(weights_.size() * ranks_.size());
  ranks_.all_gather(std::as_bytes(std::span(weights_)), std::as_writable_bytes(std::span(all)));
  const auto rank = static_cast<std::size_t>(other - headers.begin());
  const std::span first = std::span(all).first(weights_.size());
  const std::span theirs = std::span(all).subspan(rank * weights_.size(), weights_.size());
  const auto found = std::mismatch(first.begin(), first.end(), theirs.begin()).first;
  throw UsageError(
      "the ranks' weights have drifted apart: after step " + std::to_string(steps_) +
      " rank 0 and rank " + std::to_string(rank) + " have different values of parameter '" +
      layout_.param(found->param).name +
      "', which its optimizer's own step updates on every rank by itself. Such a step has to "
      "compute the same on all of them: draw random numbers from a generator that every rank has "
      "seeded alike, use nothing that one rank alone knows (its number, its losses, the time), and "
      "give all the same torch, number of threads and kind of processor; then start again from "
      "the last checkpoint");
}

void ConsistencyCheck::weights_updated(std::vector<WeightDigest> digests) {
  weights_ = std::move(digests);
}

std::vector<ConsistencyCheck::Header> ConsistencyCheck::arrive(const Header& own) {
  if (!diverged_.empty()) {
    throw UsageError(diverged_);
  }
  ranks_.set_place(place_of(own));
  Header told = own;
  told.weights = digest_of(weights_);
  std::vector<Header> headers = gather(ranks_, told);
  try {
    check_same(headers);
    if (own.point != Header::Point::kLoad) {
      check_weights(headers);
    }
  } catch (const UsageError& error) {
    diverged_ = error.what();
    throw;
  }
  return headers;
}

// Of the first rank that has gradients.
std::optional<double> ConsistencyCheck::common_scale(const std::vector<Header>& headers) {
  std::optional<std::size_t> known;
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    if (headers[rank].scale == kNoGradients) {
      continue;
    }
    if (known && headers[*known].scale != headers[rank].scale) {
      throw UsageError("the ranks scale their losses differently: the gradients of rank " +
                       std::to_string(*known) + " carry loss scale " +
                       std::to_string(headers[*known].scale) + ", those of rank " +
                       std::to_string(rank) + " carry " + std::to_string(headers[rank].scale) +
                       "; use booster.backward for every micro-batch on every rank");
    }
    known = known.value_or(rank);
  }
  return known ? std::optional(headers[*known].scale) : std::nullopt;
}

GradientMarks ConsistencyCheck::check(SyncPoint point, const GradientMarks& own,
                                      std::optional<std::size_t> optimizer) {
  const bool at_step = point == SyncPoint::kStep;
  const std::vector<Header> headers =
      arrive({.point = at_step ? Header::Point::kStep : Header::Point::kBackwardEnd,
              .optimizer = optimizer.value_or(kTheOne),
              .steps = steps_,
              .backwards = backwards_,
              .scale = own.scale.value_or(kNoGradients)});
  const std::size_t num_chunks = layout_.chunks().size();
  std::vector<std::byte> flags(2 * num_chunks + layout_.params().size());
  const auto as_byte = [](bool flag) { return flag ? std::byte{1} : std::byte{0}; };
  auto next = std::transform(own.fresh.begin(), own.fresh.end(), flags.begin(), as_byte);
  next = std::transform(own.handed.begin(), own.handed.end(), next, as_byte);
  std::transform(own.present.begin(), own.present.end(), next, as_byte);
  std::vector<std::byte> all(flags.size() * ranks_.size());
  ranks_.all_gather(flags, all);
  GradientMarks marks = own;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::byte* const theirs = all.data() + rank * flags.size();
    for (std::size_t i = 0; i < num_chunks; ++i) {
      marks.fresh[i] = marks.fresh[i] || theirs[i] != std::byte{0};
      marks.handed[i] = marks.handed[i] || theirs[num_chunks + i] != std::byte{0};
    }
    for (std::size_t i = 0; i < layout_.params().size(); ++i) {
      marks.present[i] = marks.present[i] || theirs[2 * num_chunks + i] != std::byte{0};
    }
  }
  check_repeated(all, ranks_.size(), num_chunks);
  marks.scale = common_scale(headers);
  backwards_ += at_step ? 0 : 1;
  return marks;
}

void ConsistencyCheck::check_load() {
  arrive({.point = Header::Point::kLoad, .steps = steps_, .backwards = backwards_});
  weights_.clear();
}

void ConsistencyCheck::check_read(StateRequest own) {
  arrive({.point = Header::Point::kRead, .request = own, .steps = steps_});
}

std::optional<StateRequest> ConsistencyCheck::next_read() {
  const std::vector<Header> headers = arrive({.point = Header::Point::kServe, .steps = steps_});
  for (const Header& header : headers) {
    if (header.point == Header::Point::kRead) {
      return header.request;
    }
  }
  return std::nullopt;
}

void ConsistencyCheck::end_service() {
  arrive({.point = Header::Point::kEndService, .steps = steps_});
}

void ConsistencyCheck::end_step() noexcept {
  ++steps_;
  backwards_ = 0;
}

}  // namespace castor
