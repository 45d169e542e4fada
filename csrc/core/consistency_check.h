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

/// Point of a step at which ranks compare what they do.
enum class SyncPoint : std::uint8_t { kBackwardEnd, kStep };

/// Request for an optimizer state of a parameter; each rank has its shard of the state.
struct StateRequest {
  ParamId param{};
  PayloadKind kind{};

  bool operator==(const StateRequest&) const = default;
};

/// Digest of the values of a parameter that every rank has in full and updates by itself.
struct WeightDigest {
  ParamId param{};
  std::uint64_t value = 0;

  bool operator==(const WeightDigest&) const = default;
};

/// Marks of the gradients that a rank has, or that all ranks together have.
struct GradientMarks {
  /// Makes marks of no gradients.
  explicit GradientMarks(const ChunkLayout& layout);

  std::vector<bool> fresh;      ///< per chunk: gradients came that have not been averaged
  std::vector<bool> handed;     ///< per chunk: handed over to average beside the pass, if all do
  std::vector<bool> present;    ///< per parameter: there is a gradient in its chunk
  std::optional<double> scale;  ///< scale of their losses; nullopt: there are no gradients
};

/// Check that all ranks of a model are about to do the same, before they enter a collective: it
/// would wait forever for a rank that does something else. Ranks may run different modules: a
/// parameter that has a gradient on one rank has one on all. Used by one thread at a time.
class ConsistencyCheck {
 public:
  /// Compares chunks with the other ranks. Throws UsageError where theirs differ. Both arguments
  /// outlive this.
  ConsistencyCheck(Collectives& ranks, const ChunkLayout& layout);

  /// Tells the others which gradients this rank has, and returns those that any rank has. Throws
  /// UsageError, on every rank, in three cases: the ranks are at different points; they have scaled
  /// their losses differently; some run a pass again that failed there and not on others.
  /// `optimizer`: the number of the one that steps, of several.
  [[nodiscard]] GradientMarks check(SyncPoint point, const GradientMarks& own,
                                    std::optional<std::size_t> optimizer = {});
  /// Notes that this rank has updated weights by itself, as the others have. The digests are
  /// compared at the next check, except that of a load; where they differ, that check throws
  /// UsageError on every rank. Each rank gives digests of the same parameters, in one order.
  void weights_updated(std::vector<WeightDigest> digests);
  /// Notes that the step is over.
  void end_step() noexcept;
  /// Waits until every rank is about to replace weights, or has replaced them. Throws UsageError,
  /// on every rank, where one does something else.
  void check_load();

  /// Waits until every rank is about to read a state, or some are while the others serve. Throws
  /// UsageError, on every rank, where they ask for different states or do something else.
  void check_read(StateRequest own);
  /// Waits as a rank that serves. Returns the state that others read next; nullopt: one of them has
  /// ended the service.
  [[nodiscard]] std::optional<StateRequest> next_read();
  /// Ends the service, on a rank that has read all it wants, and tells those that serve.
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
  std::vector<WeightDigest> weights_;  // of this rank's last update by itself
  std::string diverged_;               // message that every rank got: no later check passes
};

}  // namespace castor
