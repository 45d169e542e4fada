#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/chunk_layout.h"
#include "core/collectives.h"

namespace castor {

/// Where in a step ranks meet.
enum class MeetingPoint : std::uint8_t { kBackwardEnd, kStep };

/// Which gradients a rank has, or all of them together.
struct GradientMarks {
  std::vector<bool> fresh;      ///< per chunk: gradients came that have not been averaged
  std::vector<bool> present;    ///< per parameter: there is a gradient in its chunk
  std::optional<double> scale;  ///< of the losses that they are of; nullopt: there are none
};

/// How the ranks of a model know that they do the same before they enter a collective, which would
/// wait for ever for one that does something else. Ranks may run different modules: what one has a
/// gradient of, all have. Used by one thread at a time.
class RankMeeting {
 public:
  /// Meets the others. Throws UsageError where their chunks are not these. Both outlive this.
  RankMeeting(Collectives& ranks, const ChunkLayout& layout);

  /// Tells the others what this rank has, and returns what any has. Throws UsageError, on every
  /// rank, where they are at different points or have scaled their losses differently.
  [[nodiscard]] GradientMarks meet(MeetingPoint point, const GradientMarks& own);
  /// The step is over.
  void end_step() noexcept;

 private:
  struct Header;
  static void check_same(const std::vector<Header>& headers);
  [[nodiscard]] static std::optional<double> common_scale(const std::vector<Header>& headers);

  Collectives& ranks_;
  const ChunkLayout& layout_;
  std::uint64_t steps_ = 0;
  std::uint64_t backwards_ = 0;  // in this step
};

}  // namespace castor
