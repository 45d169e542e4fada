#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/collectives.h"
#include "core/payload.h"

namespace castor {

/// Where in a step ranks meet.
enum class MeetingPoint : std::uint8_t { kBackwardEnd, kStep };

/// Of a parameter, what its optimizer keeps; each rank has its piece.
struct StateRequest {
  ParamId param{};
  PayloadKind kind{};

  bool operator==(const StateRequest&) const = default;
};

/// Of a parameter that every rank has whole and updates by itself: what it has come to.
struct WeightDigest {
  ParamId param{};
  std::uint64_t value = 0;

  bool operator==(const WeightDigest&) const = default;
};

/// Which gradients a rank has, or all of them together.
struct GradientMarks {
  /// None.
  explicit GradientMarks(const ChunkLayout& layout);

  std::vector<bool> fresh;      ///< per chunk: gradients came that have not been averaged
  std::vector<bool> handed;     ///< per chunk: ... to be averaged beside the pass, if all do so
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
  /// rank, where they are at different points, have scaled their losses differently, or some have
  /// run a pass again that failed there and not on others. `optimizer`: which steps, of several.
  [[nodiscard]] GradientMarks meet(MeetingPoint point, const GradientMarks& own,
                                   std::optional<std::size_t> optimizer = {});
  /// This rank has updated weights by itself, as the others have: they are compared where ranks
  /// meet next, which throws UsageError on every rank where they differ. As many of the same
  /// parameters on each, in one order.
  void weights_updated(std::vector<WeightDigest> digests);
  /// The step is over.
  void end_step() noexcept;
  /// Weights are about to be replaced by every rank, or have been. Throws UsageError, on every
  /// rank, where one does something else.
  void meet_to_load();

  /// A state is about to be read by every rank, or by some while the others serve. Throws
  /// UsageError, on every rank, where they ask for different ones or do something else.
  void meet_to_read(StateRequest own);
  /// Of a rank that serves: what others read next; nullopt: one of them has ended the service.
  [[nodiscard]] std::optional<StateRequest> meet_to_serve();
  /// Of a rank that has read all it wants: those that serve are told.
  void end_service();

 private:
  struct Header;
  std::vector<Header> arrive(const Header& own);
  void check_same(const std::vector<Header>& headers) const;
  void check_weights(const std::vector<Header>& headers);
  [[nodiscard]] std::string place_of(const Header& header) const;
  [[nodiscard]] static std::optional<double> common_scale(const std::vector<Header>& headers);

  Collectives& ranks_;
  const ChunkLayout& layout_;
  std::uint64_t steps_ = 0;
  std::uint64_t backwards_ = 0;        // in this step
  std::vector<WeightDigest> weights_;  // of the last update by itself
  std::string diverged_;               // what every rank was told: they cannot meet again
};

}  // namespace castor
