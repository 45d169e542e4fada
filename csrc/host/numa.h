#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "host/page_source.h"

struct hwloc_topology;

namespace castor {

struct NumaNode {
  /// Number of the node in the operating system (numactl --hardware).
  unsigned os_index = 0;
  std::size_t memory_bytes = 0;
  std::size_t num_pus = 0;
};

/// The NUMA nodes and caches of a machine, as hwloc sees them. Immutable after construction, so
/// thread-safe.
class NumaTopology {
 public:
  /// Returns whether castor was built with hwloc; without it the constructors throw Error.
  [[nodiscard]] static bool available() noexcept;

  /// Reads this machine.
  NumaTopology();
  /// Reads a machine in hwloc's synthetic notation ("node:2 pu:4"), for tests; bind() refuses
  /// there. Throws InvalidArgument if hwloc does not understand it.
  explicit NumaTopology(const std::string& synthetic);

  /// Returns the nodes, at least one, ordered by os_index.
  [[nodiscard]] const std::vector<NumaNode>& nodes() const noexcept { return nodes_; }

  /// Returns the bytes of all last-level caches together; 0 where hwloc knows of none.
  [[nodiscard]] std::size_t cache_bytes() const noexcept { return cache_bytes_; }

  /// Places the pages of `range` on a node when they are first touched; when the node is full, the
  /// kernel takes another. Returns false when there is no such node or the system refuses; errno
  /// says why.
  [[nodiscard]] bool bind(std::span<std::byte> range, unsigned os_index) const noexcept;

 private:
  struct Destroy {
    void operator()(hwloc_topology* topology) const noexcept;
  };

  void read();

  std::unique_ptr<hwloc_topology, Destroy> topology_;
  std::vector<NumaNode> nodes_;
  std::size_t cache_bytes_ = 0;
};

/// Adaptor that binds the pages of another source to one NUMA node. A refused binding is tolerated,
/// because the memory is as good elsewhere, and shows in description(). Thread-safe.
class BoundPages final : public PageSource {
 public:
  /// Throws InvalidArgument if the machine has no such node; the message lists the nodes it has.
  BoundPages(std::unique_ptr<PageSource> upstream, NumaTopology topology, unsigned os_index);

  [[nodiscard]] std::byte* map(std::size_t bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] bool unmap(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] bool discard(std::byte* data, std::size_t bytes) noexcept override;
  void advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept override;
  void make_resident(std::byte* data, std::size_t bytes) noexcept override;
  void withhold_from_children(std::byte* data, std::size_t bytes) noexcept override;
  void share_with_children(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] std::string description() const override;

 private:
  const std::unique_ptr<PageSource> upstream_;
  const NumaTopology topology_;
  const unsigned os_index_;
  // Relaxed: a figure for reports.
  std::atomic<std::size_t> num_refusals_{0};
};

}  // namespace castor
