#include "ranks/gradient_relay.h"

#include <algorithm>
#include <cstdint>

#include "core/chunk_layout.h"
#include "optim/average.h"

namespace castor {
namespace {

/// Sums in fp32 of elements of 2 bytes.
constexpr std::size_t kMostGrowth = 2;

std::size_t piece_bytes(std::size_t window, Collectives& ranks, std::size_t num_sums) {
  const std::size_t node = ranks.node()->size();
  const std::size_t granule = ranks.size() * kParamAlignment;
  return window / (node + num_sums * kMostGrowth) * node / granule * granule;
}

std::uint32_t tag_of_sums(std::size_t number) { return static_cast<std::uint32_t>(2 * number); }
std::uint32_t tag_of_mean(std::size_t number) { return tag_of_sums(number) + 1; }

}  // namespace

std::size_t GradientRelay::window_bytes(std::size_t piece, std::size_t ranks_of_machine) {
  return piece + piece / ranks_of_machine * kSums * kMostGrowth;
}

GradientRelay::GradientRelay(Collectives& ranks, std::span<const std::byte> gradients,
                             std::byte* common, ScalarType type, Executor& executor,
                             std::span<std::byte> window, RankFigures& figures)
    : ranks_(ranks),
      node_(*ranks.node()),
      others_(ranks),
      gradients_(gradients),
      common_(common),
      type_(type),
      executor_(executor),
      window_(window),
      figures_(figures),
      piece_bytes_(piece_bytes(window.size(), ranks, kSums)),
      num_pieces_((gradients.size() + piece_bytes_ - 1) / piece_bytes_),
      means_(num_pieces_) {}

// A mean is there when its sums have passed all machines: after as many pieces more.
void GradientRelay::run() {
  const std::size_t behind = others_.num_nodes();
  for (std::size_t i = 0; i < num_pieces_ + behind; ++i) {
    if (i < num_pieces_) {
      add(i);
    }
    if (i >= behind) {
      pass_mean(i - behind);
    }
  }
  others_.wait_all(sums_sent_);
  others_.wait_all(means_sent_);
}

std::size_t GradientRelay::bytes_of(std::size_t number) const {
  return std::min(piece_bytes_, gradients_.size() - number * piece_bytes_);
}

// This rank's part of it.
std::span<std::byte> GradientRelay::mean_of(std::size_t number) const {
  const std::size_t bytes = bytes_of(number) / node_.size();
  return {common_ + number * piece_bytes_ + node_.rank() * bytes, bytes};
}

// What this machine's ranks have to the sums of those before it.
void GradientRelay::add(std::size_t number) {
  const std::span<std::byte> mean = mean_of(number);
  const std::size_t numel = mean.size() / size_of(type_);
  const std::size_t slot = number % kSums;
  const std::size_t slot_bytes = piece_bytes_ / node_.size() * kMostGrowth;
  const std::span<std::byte> sums =
      window_.subspan(piece_bytes_ + slot * slot_bytes, numel * sizeof(float));
  auto* const values = reinterpret_cast<float*>(sums.data());
  const bool first = others_.node() == 0;
  const bool last = others_.node() + 1 == others_.num_nodes();
  others_.wait(sums_sent_[slot]);
  PendingMessage before;
  if (!first) {
    before = others_.receive(others_.node() - 1, tag_of_sums(number), sums);
  }
  const std::span<std::byte> parts = window_.first(bytes_of(number));
  or_leave(ranks_, [&] {
    node_.all_to_all(gradients_.subspan(number * piece_bytes_, parts.size()), parts);
  });
  figures_.add_bytes((node_.size() - 1) * mean.size());
  others_.wait(before);
  if (last) {
    average_last(&executor_, mean.data(), values, parts.data(), node_.size(), ranks_.size(), numel,
                 type_);
    send_mean(0, number);
    return;
  }
  // Not before: until now a rank of this machine may have read here what it has not written.
  means_[number] = others_.receive(first ? others_.num_nodes() - 1 : others_.node() - 1,
                                   tag_of_mean(number), mean);
  add_up(&executor_, values, !first, parts.data(), node_.size(), numel, type_);
  sums_sent_[slot] = others_.send(others_.node() + 1, tag_of_sums(number), sums);
  figures_.add_crossed(sums.size());
}

// From the first machine on, as far as the one before the last, which had it first.
void GradientRelay::pass_mean(std::size_t number) {
  others_.wait(means_[number]);
  if (others_.node() + 2 < others_.num_nodes()) {
    send_mean(others_.node() + 1, number);
  }
}

void GradientRelay::send_mean(std::size_t to, std::size_t number) {
  const std::span<const std::byte> mean = mean_of(number);
  means_sent_.push_back(others_.send(to, tag_of_mean(number), mean));
  figures_.add_crossed(mean.size());
}

}  // namespace castor
