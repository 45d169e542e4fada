#include "store/rank_states.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace castor {
namespace {

/// Of each rank's piece, so much is on its way at once.
constexpr std::size_t kWindowBytes = std::size_t{1} << 20;

}  // namespace

std::vector<std::byte> RankStates::read(ParamId param, PayloadKind kind) {
  const StateRequest request{.param = param, .kind = kind};
  consistency_.check_read(request);
  std::vector<std::byte> full(places_.bytes(param, kind, layout_.param(param).numel));
  gather(request, full.data());
  return full;
}

void RankStates::serve() {
  while (const auto request = consistency_.next_read()) {
    gather(*request, nullptr);
  }
}

void RankStates::gather(const StateRequest& request, std::byte* full) {
  struct Shard {
    std::size_t begin = 0;
    std::size_t bytes = 0;
  };
  std::vector<Shard> shards;
  std::size_t longest = 0;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Piece piece = shards_.piece(request.param, rank);
    shards.push_back({.begin = places_.bytes(request.param, request.kind, piece.first_element),
                      .bytes = places_.bytes(request.param, request.kind, piece.numel)});
    longest = std::max(longest, shards.back().bytes);
  }
  const std::size_t window = std::min(longest, kWindowBytes);
  std::vector<std::byte> sent(window);
  std::vector<std::byte> received(window * ranks_.size());
  const auto of_round = [&](const Shard& shard, std::size_t begin) {
    return shard.bytes > begin ? std::min(shard.bytes - begin, window) : 0;
  };
  const auto exchange = [&](const ChunkMemory& memory) {
    const Shard& own = shards[ranks_.rank()];
    for (std::size_t begin = 0; begin < longest; begin += window) {
      if (const std::size_t bytes = of_round(own, begin)) {
        const std::size_t first = shards_.piece(request.param).first_element;
        std::memcpy(sent.data(),
                    places_.element(memory, request.param, request.kind, first) + begin, bytes);
      }
      ranks_.all_gather(sent, received);
      for (std::size_t rank = 0; rank < shards.size() && full != nullptr; ++rank) {
        std::copy_n(received.data() + rank * window, of_round(shards[rank], begin),
                    full + shards[rank].begin + begin);
      }
    }
  };
  or_leave(ranks_, [&] {
    places_.with_states(layout_.place(request.param).chunk, StreamAccess::kRead, exchange);
  });
}

}  // namespace castor
