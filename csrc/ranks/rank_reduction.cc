#include "ranks/rank_reduction.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/chunk_layout.h"
#include "core/units.h"
#include "optim/average.h"
#include "ranks/gradient_relay.h"

namespace castor {

// Gradients that go from machine to machine need room beside the piece, and smaller pieces, of
// which several are on their way.
std::size_t RankReduction::window_bytes(std::size_t largest, std::size_t ranks, std::size_t sharing,
                                        ReducedOn where) {
  if (where == ReducedOn::kDevice) {
    return piece_bytes(largest, ranks) / ranks;
  }
  if (sharing > 1 && sharing < ranks) {
    return GradientRelay::window_bytes(piece_bytes(largest, ranks, kMostPieceBytes / 2), sharing);
  }
  return piece_bytes(largest, ranks);
}

void RankReduction::reduce(Payload& gradients, ScalarType type,
                           std::span<const std::byte> gathered) {
  const bool shared = shared_storage_ != nullptr && shared_storage_->contains(gradients.storage());
  if (sums_ != nullptr && all_true(ranks_, staging_.staged(gradients))) {
    sums_->all_reduce_mean({gradients.data(), gradients.bytes()}, type);
    gradients.drop_copy();
    figures_.add_bytes(2 * (ranks_.size() - 1) * (gradients.bytes() / ranks_.size()));
    return;
  }
  const bool brought = sums_ == nullptr && staging_.staged(gradients);
  if (shared && brought) {
    gradients.take_copy(Payload::CopyContents::kZeros);
  }
  const std::span<std::byte> all = staging_.on_host(gradients);
  if (brought) {
    staging_.bring(gradients, all);
  }
  if (shared && ranks_.messages() != nullptr) {
    GradientRelay(ranks_, all, shared_storage_->common(gradients.storage()), type, executor_,
                  {window_.data(), window_.bytes()}, figures_)
        .run();
  } else {
    const bool staged = sums_ != nullptr && staging_.staged(gradients);
    exchange(gradients,
             staged ? std::span<const std::byte>(gradients.data(), gradients.bytes()) : gathered,
             all, type, shared);
  }
  if (!shared) {
    staging_.send(gradients, all);
    return;
  }
  barrier(*ranks_.node());
  if (staging_.staged(gradients)) {
    gradients.drop_copy();
    staging_.send(gradients, staging_.on_host(gradients));
  } else if (gradients.away()) {
    std::memcpy(gradients.data(), shared_storage_->common(gradients.storage()), gradients.bytes());
  } else if (gradients.has_copy()) {
    gradients.drop_copy();
  } else if (gathered.empty()) {
    shared_storage_->forget({gradients.host_storage(), gradients.bytes()});
  }
}

// `on_device`: this rank's values in memory of the device; empty: `all` has them.
void RankReduction::exchange(const Payload& gradients, std::span<const std::byte> on_device,
                             std::span<std::byte> all, ScalarType type, bool shared) {
  const std::size_t granule = ranks_.size() * kParamAlignment;
  const std::size_t room = sums_ == nullptr ? window_.bytes() : window_.bytes() * ranks_.size();
  const std::size_t step = room / granule * granule;
  for (std::size_t begin = 0; begin < all.size(); begin += step) {
    const std::span<std::byte> piece = all.subspan(begin, std::min(step, all.size() - begin));
    const std::span own(window_.data(), piece.size() / ranks_.size());
    sum_piece(on_device, piece, begin, own, type);
    if (shared) {
      // Every rank has sent what it has of this piece.
      std::memcpy(shared_storage_->common(gradients.storage() + begin) + ranks_.rank() * own.size(),
                  own.data(), own.size());
    } else {
      ranks_.all_gather(own, piece);
    }
    figures_.add_bytes((shared ? 1 : 2) * (ranks_.size() - 1) * own.size());
  }
}

void RankReduction::sum_piece(std::span<const std::byte> on_device, std::span<std::byte> piece,
                              std::size_t begin, std::span<std::byte> own, ScalarType type) {
  if (sums_ == nullptr) {
    const std::span parts(window_.data(), piece.size());
    ranks_.all_to_all(piece, parts);
    average(&executor_, own.data(), parts.data(), ranks_.size(), own.size() / size_of(type), type);
  } else if (!on_device.empty()) {
    sums_->reduce_scatter_mean(on_device.subspan(begin, piece.size()),
                               DeviceReduction::From::kDevice, own, type);
  } else {
    sums_->reduce_scatter_mean(piece, DeviceReduction::From::kHost, own, type);
  }
}

// A rank's part is in one piece, so what ranks exchange of a part in several windows is gathered
// from all parts first, in one half of the window, and comes into the other.
void RankReduction::reduce_scatter(std::span<const std::byte> gradients, DeviceReduction::From from,
                                   std::span<std::byte> shard, ScalarType type) {
  const std::size_t ranks = ranks_.size();
  if (sums_ != nullptr) {
    sums_->reduce_scatter_mean(gradients, from, shard, type);
    figures_.add_bytes((ranks - 1) * shard.size());
    return;
  }
  const bool at_once = gradients.size() <= window_.bytes();
  const std::size_t step =
      at_once ? shard.size() : window_.bytes() / 2 / ranks / kParamAlignment * kParamAlignment;
  for (std::size_t begin = 0; begin < shard.size(); begin += step) {
    const std::size_t bytes = std::min(step, shard.size() - begin);
    const std::span received(window_.data(), ranks * bytes);
    std::span<const std::byte> sent = gradients;
    if (!at_once) {
      std::byte* const gathered = window_.data() + ranks * step;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::memcpy(gathered + rank * bytes, gradients.data() + rank * shard.size() + begin, bytes);
      }
      sent = {gathered, ranks * bytes};
    }
    ranks_.all_to_all(sent, received);
    average(&executor_, shard.data() + begin, received.data(), ranks, bytes / size_of(type), type);
    figures_.add_bytes((ranks - 1) * bytes);
  }
}

}  // namespace castor
