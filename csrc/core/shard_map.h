#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"

namespace castor {

/// A run of elements of one parameter, counted from its first: so that what depends on an element's
/// place (random rounding, blocks of moments) does not depend on how parameters are cut.
struct Piece {
  ParamId param{};
  std::uint64_t first_element = 0;
  std::size_t numel = 0;
};

/// Which parts of the parameters this process updates, and so whose gradients it measures.
/// Immutable.
class ShardMap {
 public:
  /// Of a process that is alone: everything is its own.
  explicit ShardMap(const ChunkLayout& layout) {
    for (std::size_t i = 0; i < layout.params().size(); ++i) {
      pieces_.push_back({.param = ParamId{static_cast<std::uint32_t>(i)},
                         .first_element = 0,
                         .numel = layout.params()[i].numel});
    }
  }

  /// Of one parameter, ascending.
  [[nodiscard]] std::span<const Piece> pieces(ParamId param) const {
    return {&pieces_.at(index(param)), 1};
  }

 private:
  std::vector<Piece> pieces_;  // one of each parameter
};

}  // namespace castor
