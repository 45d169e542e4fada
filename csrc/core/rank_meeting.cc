#include "core/rank_meeting.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "core/error.h"

namespace castor {
namespace {

constexpr double kNoGradients = 0.0;  // in place of a loss scale

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

std::string describe(const LayoutFacts& facts) {
  return std::to_string(facts.num_params) + " parameters in " + std::to_string(facts.num_chunks) +
         " chunks of " + std::to_string(facts.chunk_bytes) + " bytes";
}

/// What each rank gives, in rank order.
template <typename T>
std::vector<T> gather(Collectives& ranks, const T& own) {
  std::vector<T> all(ranks.size());
  ranks.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

}  // namespace

/// First in every message.
struct RankMeeting::Header {
  MeetingPoint point = MeetingPoint::kBackwardEnd;
  std::uint64_t steps = 0;
  std::uint64_t backwards = 0;
  double scale = kNoGradients;

  [[nodiscard]] std::string place() const {
    return (point == MeetingPoint::kStep
                ? "calls optimizer.step() after " + std::to_string(backwards) +
                      " backward passes, for step "
                : "ends backward pass " + std::to_string(backwards + 1) + " of step ") +
           std::to_string(steps + 1);
  }
};

RankMeeting::RankMeeting(Collectives& ranks, const ChunkLayout& layout)
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

void RankMeeting::check_same(const std::vector<Header>& headers) {
  for (std::size_t rank = 1; rank < headers.size(); ++rank) {
    const Header& first = headers[0];
    const Header& other = headers[rank];
    const std::string pair = "rank 0 " + first.place() + ", while rank " + std::to_string(rank);
    if (first.point != other.point || first.steps != other.steps ||
        first.backwards != other.backwards) {
      throw UsageError("the ranks do different things: " + pair + " " + other.place() +
                       ". Every rank runs as many backward passes and steps as the others, and "
                       "leaves booster.no_sync at the same ones; give each as many batches");
    }
  }
}

// Of the first rank that has gradients.
std::optional<double> RankMeeting::common_scale(const std::vector<Header>& headers) {
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

GradientMarks RankMeeting::meet(MeetingPoint point, const GradientMarks& own) {
  const Header header{.point = point,
                      .steps = steps_,
                      .backwards = backwards_,
                      .scale = own.scale.value_or(kNoGradients)};
  const std::size_t num_chunks = layout_.chunks().size();
  std::vector<std::byte> message(sizeof(Header) + num_chunks + layout_.params().size());
  std::memcpy(message.data(), &header, sizeof(Header));
  const auto flags = message.begin() + sizeof(Header);
  const auto as_byte = [](bool flag) { return flag ? std::byte{1} : std::byte{0}; };
  std::transform(own.fresh.begin(), own.fresh.end(), flags, as_byte);
  std::transform(own.present.begin(), own.present.end(),
                 flags + static_cast<std::ptrdiff_t>(num_chunks), as_byte);

  std::vector<std::byte> all(message.size() * ranks_.size());
  ranks_.all_gather(message, all);
  std::vector<Header> headers(ranks_.size());
  GradientMarks marks = own;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::byte* const of_rank = all.data() + rank * message.size();
    std::memcpy(&headers[rank], of_rank, sizeof(Header));
    const std::byte* const theirs = of_rank + sizeof(Header);
    for (std::size_t i = 0; i < num_chunks; ++i) {
      marks.fresh[i] = marks.fresh[i] || theirs[i] != std::byte{0};
    }
    for (std::size_t i = 0; i < layout_.params().size(); ++i) {
      marks.present[i] = marks.present[i] || theirs[num_chunks + i] != std::byte{0};
    }
  }
  check_same(headers);
  marks.scale = common_scale(headers);
  backwards_ += point == MeetingPoint::kBackwardEnd ? 1 : 0;
  return marks;
}

void RankMeeting::end_step() noexcept {
  ++steps_;
  backwards_ = 0;
}

}  // namespace castor
