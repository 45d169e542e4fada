#include "ranks/piece_norms.h"

#include <algorithm>
#include <array>

#include "optim/gradient.h"

namespace castor {
namespace {

/// From this size on a piece is worth several threads.
constexpr std::size_t kParallelNumel = std::size_t{1} << 18;

/// How far the sum of a gradient's squares has come.
struct Sum {
  double blocks = 0.0;                     // of whole blocks
  std::array<double, kNormLanes> lanes{};  // of the block that has begun
};

/// A piece's sum, as far as this rank can make it alone.
class PieceSum {
 public:
  explicit PieceSum(const GradientPiece& piece) : piece_(piece) {
    const std::size_t begun = piece.first_element % kNormBlock;
    head_ = std::min(piece.numel, begun == 0 ? 0 : kNormBlock - begun);
    const std::size_t rest = piece.numel - head_;
    sums_.resize((ends() ? rest + kNormBlock - 1 : rest) / kNormBlock);
  }

  [[nodiscard]] bool begins() const noexcept { return piece_.first_element == 0; }
  [[nodiscard]] bool ends() const noexcept {
    return piece_.first_element + piece_.numel == piece_.whole_numel;
  }
  [[nodiscard]] std::size_t cut() const noexcept { return piece_.cut; }

  void sum_blocks(Executor* executor) {
    square_norms_of_blocks(executor, at(head_), blocks_numel(), piece_.type, sums_);
  }
  /// Behind what lies before the piece.
  [[nodiscard]] Sum behind(Sum sum) const {
    if (head_ > 0) {
      add_squares(sum.lanes, at(0), head_, piece_.type);
      const std::uint64_t done = piece_.first_element + head_;
      if (done % kNormBlock != 0 && done != piece_.whole_numel) {
        return sum;  // the block goes on behind the piece
      }
      sum.blocks += sum_of_lanes(sum.lanes);
      sum.lanes = {};
    }
    for (const double block : sums_) {
      sum.blocks += block;
    }
    if (const std::size_t done = head_ + blocks_numel(); done < piece_.numel) {
      add_squares(sum.lanes, at(done), piece_.numel - done, piece_.type);
    }
    return sum;
  }

 private:
  [[nodiscard]] std::size_t blocks_numel() const noexcept {
    return std::min(sums_.size() * kNormBlock, piece_.numel - head_);
  }
  [[nodiscard]] const std::byte* at(std::size_t element) const noexcept {
    return piece_.data + element * size_of(piece_.type);
  }

  const GradientPiece& piece_;
  std::size_t head_ = 0;  // elements of a block that begins before the piece
  std::vector<double> sums_;
};

}  // namespace

std::size_t square_norm_bytes(std::size_t ranks, std::size_t num_pieces, std::size_t num_cuts) {
  return (ranks - 1) * ((ranks - 1) * num_cuts * sizeof(Sum) + num_pieces * sizeof(double));
}

std::vector<double> square_norms(Collectives& ranks, Executor& executor,
                                 std::span<const GradientPiece> pieces, std::size_t num_cuts,
                                 RankFigures& figures) {
  if (pieces.empty()) {
    return {};
  }
  std::vector<PieceSum> sums(pieces.begin(), pieces.end());
  const auto large = [&](std::size_t i) { return pieces[i].numel >= kParallelNumel; };
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (large(i)) {
      sums[i].sum_blocks(&executor);
    }
  }
  executor.parallel_for(sums.size(), [&](std::size_t i) {
    if (!large(i)) {
      sums[i].sum_blocks(nullptr);
    }
  });
  std::vector<double> totals(pieces.size(), 0.0);  // of gradients that end here
  std::vector<Sum> at_cuts(num_cuts);              // of those that go on
  const auto take = [&](std::size_t i, const Sum& before) {
    const Sum sum = sums[i].behind(before);
    if (sums[i].ends()) {
      totals[i] = sum.blocks;
    } else {
      at_cuts[sums[i].cut()] = sum;
    }
  };
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].numel > 0 && sums[i].begins()) {
      take(i, {});
    }
  }
  std::vector<Sum> all_cuts(ranks.size() * num_cuts);
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    ranks.all_gather(std::as_bytes(std::span(at_cuts)),
                     std::as_writable_bytes(std::span(all_cuts)));
    for (std::size_t i = 0; i < pieces.size() && rank == ranks.rank(); ++i) {
      if (pieces[i].numel > 0 && !sums[i].begins()) {
        take(i, all_cuts[(rank - 1) * num_cuts + pieces[i].cut]);
      }
    }
  }
  std::vector<double> of_all(ranks.size() * totals.size());
  ranks.all_gather(std::as_bytes(std::span(totals)), std::as_writable_bytes(std::span(of_all)));
  for (std::size_t i = 0; i < totals.size(); ++i) {
    totals[i] = 0.0;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      totals[i] += of_all[rank * totals.size() + i];  // zeros but for one
    }
  }
  figures.add_bytes(square_norm_bytes(ranks.size(), pieces.size(), num_cuts));
  return totals;
}

}  // namespace castor
