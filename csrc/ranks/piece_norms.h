#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/collectives.h"
#include "core/executor.h"
#include "core/scalar_type.h"
#include "ranks/rank_figures.h"

namespace castor {

/// This rank's shard of a gradient: a run of its elements.
struct GradientPiece {
  const std::byte* data = nullptr;  ///< address of the piece's first element
  std::uint64_t first_element = 0;  ///< index in the gradient, a multiple of kNormLanes
  std::size_t numel = 0;            ///< 0: other ranks have all of it
  std::size_t whole_numel = 0;      ///< elements of the full gradient
  ScalarType type = ScalarType::kFloat32;
  /// Number of the cut that sharded the gradient, below `num_cuts`. Between two ranks of one cut,
  /// at most one gradient lies on both sides.
  std::size_t cut = 0;
};

/// Returns each gradient's sum of squares, on every rank, with the bits of copy_and_square_norm()
/// over the full gradient. All ranks sum at once the blocks of elements that a rank has alone. The
/// sum of a gradient on both sides of a cut is handed from rank to rank. That takes size() - 1
/// small exchanges, and one exchange of the sums.
///
/// Collective: `pieces` are of the same gradients in the same order on every rank, of `num_cuts`
/// cuts. Throws the errors of Collectives.
[[nodiscard]] std::vector<double> square_norms(Collectives& ranks, Executor& executor,
                                               std::span<const GradientPiece> pieces,
                                               std::size_t num_cuts, RankFigures& figures);

/// Returns the bytes that square_norms() sends from a rank to the others.
[[nodiscard]] std::size_t square_norm_bytes(std::size_t ranks, std::size_t num_pieces,
                                            std::size_t num_cuts);

}  // namespace castor
