#pragma once

#include <cstddef>
#include <functional>

namespace castor {

/// Seam for CPU parallelism. Implementations in csrc/parallel: TBB, and plain threads for
/// ThreadSanitizer builds (which cannot see into an uninstrumented TBB).
class Executor {
 public:
  virtual ~Executor() = default;

  /// Calls body(0) ... body(count - 1), each exactly once, on any thread, in any order, and
  /// returns when all are done. The first exception is rethrown here; remaining calls may be
  /// skipped then. May be called from several threads; must not be called from a body.
  virtual void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) = 0;

  [[nodiscard]] virtual std::size_t num_threads() const noexcept = 0;
};

}  // namespace castor
