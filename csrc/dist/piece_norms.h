#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/collectives.h"
#include "core/executor.h"
#include "core/scalar_type.h"
#include "dist/rank_figures.h"

namespace castor {

/// What this rank has of a gradient that is cut over the ranks: a run of its elements.
struct GradientPiece {
  const std::byte* data = nullptr;  ///< of the piece's first element
  std::uint64_t first_element = 0;  ///< its number in the gradient: a multiple of kNormLanes
  std::size_t numel = 0;            ///< 0: other ranks have all of it
  std::size_t whole_numel = 0;      ///< of the gradient
  ScalarType type = ScalarType::kFloat32;
  std::size_t cut = 0;  ///< what it was cut with: of one cut at most one gradient is on both sides
};

/// Each gradient's sum of squares, with the bits of copy_and_square_norm() over whole ones, on
/// every rank. Blocks of elements that are a rank's alone are summed by all ranks at once; what
/// lies on both sides of a cut is handed from rank to rank: size() - 1 small exchanges, and one of
/// the sums.
///
/// Collective: `pieces` are of the same gradients in the same order on every rank, of `num_cuts`
/// cuts. Throws as Collectives.
[[nodiscard]] std::vector<double> square_norms(Collectives& ranks, Executor& executor,
                                               std::span<const GradientPiece> pieces,
                                               std::size_t num_cuts, RankFigures& figures);

/// What it sends from a rank to the others.
[[nodiscard]] std::size_t square_norm_bytes(std::size_t ranks, std::size_t num_pieces,
                                            std::size_t num_cuts);

}  // namespace castor
