#pragma once

#include <cstddef>
#include <memory>

#include "core/executor.h"

namespace castor {

/// Executor over a TBB task arena of its own, so that other users of TBB in the process (torch, the
/// user's code) neither take its threads nor see its tasks.
///
/// A caller that waits works on its own loop only (isolation), so it may hold a lock that its own
/// bodies do not take. Owned by the runtime; loops in flight must have ended before it is
/// destroyed. Thread-safe.
class TbbExecutor final : public Executor {
 public:
  /// Makes as many threads as num_available_cores().
  TbbExecutor();
  /// Makes `num_threads` threads, the calling thread included. More threads than TBB's own limit
  /// (the cores) raise that limit for the process while the executor lives. Throws InvalidArgument
  /// if the number is 0.
  explicit TbbExecutor(std::size_t num_threads);
  ~TbbExecutor() override;

  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) override;
  [[nodiscard]] std::size_t num_threads() const noexcept override { return num_threads_; }

 private:
  struct Tbb;  // keeps TBB's headers out of everyone else's

  const std::size_t num_threads_;
  const std::unique_ptr<Tbb> tbb_;
};

}  // namespace castor
