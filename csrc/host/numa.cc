#include "host/numa.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/error.h"

#if defined(CASTOR_HAVE_HWLOC)
#include <hwloc.h>
#endif

namespace castor {

#if defined(CASTOR_HAVE_HWLOC)

namespace {

hwloc_topology_t new_topology() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) {
    throw Error("hwloc could not be initialised");
  }
  return topology;
}

std::size_t bytes_of_last_caches(hwloc_topology_t topology) {
  for (const hwloc_obj_type_t level : {HWLOC_OBJ_L5CACHE, HWLOC_OBJ_L4CACHE, HWLOC_OBJ_L3CACHE,
                                       HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L1CACHE}) {
    std::size_t bytes = 0;
    hwloc_obj_t cache = nullptr;
    while ((cache = hwloc_get_next_obj_by_type(topology, level, cache)) != nullptr) {
      bytes += cache->attr->cache.size;
    }
    if (bytes > 0) {
      return bytes;
    }
  }
  return 0;
}

}  // namespace

bool NumaTopology::available() noexcept { return true; }

void NumaTopology::Destroy::operator()(hwloc_topology* topology) const noexcept {
  hwloc_topology_destroy(topology);
}

NumaTopology::NumaTopology() : topology_(new_topology()) { read(); }

NumaTopology::NumaTopology(const std::string& synthetic) : topology_(new_topology()) {
  if (hwloc_topology_set_synthetic(topology_.get(), synthetic.c_str()) != 0) {
    throw InvalidArgument("hwloc does not understand the topology \"" + synthetic + "\"");
  }
  read();
}

void NumaTopology::read() {
  if (hwloc_topology_load(topology_.get()) != 0) {
    throw Error("hwloc could not read the topology of this machine");
  }
  hwloc_obj_t node = nullptr;
  while ((node = hwloc_get_next_obj_by_type(topology_.get(), HWLOC_OBJ_NUMANODE, node)) !=
         nullptr) {
    const int num_pus = hwloc_bitmap_weight(node->cpuset);
    nodes_.push_back({.os_index = node->os_index,
                      .memory_bytes = node->attr->numanode.local_memory,
                      .num_pus = num_pus < 0 ? 0 : static_cast<std::size_t>(num_pus)});
  }
  if (nodes_.empty()) {
    throw Error("hwloc found no NUMA node on this machine");
  }
  std::sort(nodes_.begin(), nodes_.end(),
            [](const NumaNode& a, const NumaNode& b) { return a.os_index < b.os_index; });
  cache_bytes_ = bytes_of_last_caches(topology_.get());
}

bool NumaTopology::bind(std::span<std::byte> range, unsigned os_index) const noexcept {
  const hwloc_obj_t node = hwloc_get_numanode_obj_by_os_index(topology_.get(), os_index);
  if (node == nullptr) {
    errno = EINVAL;
    return false;
  }
  if (hwloc_topology_is_thissystem(topology_.get()) == 0) {
    errno = ENOSYS;  // hwloc would report success for a synthetic machine
    return false;
  }
  return hwloc_set_area_membind(topology_.get(), range.data(), range.size_bytes(), node->nodeset,
                                HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET) == 0;
}

#else  // no hwloc

bool NumaTopology::available() noexcept { return false; }

void NumaTopology::Destroy::operator()(hwloc_topology* /*topology*/) const noexcept {}

NumaTopology::NumaTopology() { read(); }

NumaTopology::NumaTopology(const std::string& /*synthetic*/) { read(); }

void NumaTopology::read() {
  throw Error(
      "castor was built without hwloc, which names NUMA nodes; install libhwloc-dev and rebuild");
}

bool NumaTopology::bind(std::span<std::byte> /*range*/, unsigned /*os_index*/) const noexcept {
  errno = ENOSYS;
  return false;
}

#endif

BoundPages::BoundPages(std::unique_ptr<PageSource> upstream, NumaTopology topology,
                       unsigned os_index)
    : upstream_(std::move(upstream)), topology_(std::move(topology)), os_index_(os_index) {
  std::string known;
  for (const NumaNode& node : topology_.nodes()) {
    if (node.os_index == os_index) {
      return;
    }
    known += (known.empty() ? "" : ", ") + std::to_string(node.os_index);
  }
  throw InvalidArgument("there is no NUMA node " + std::to_string(os_index) +
                        " on this machine; its nodes are " + known);
}

std::byte* BoundPages::map(std::size_t bytes, std::size_t alignment) noexcept {
  std::byte* const data = upstream_->map(bytes, alignment);
  if (data != nullptr && !topology_.bind({data, bytes}, os_index_)) {
    num_refusals_.fetch_add(1, std::memory_order_relaxed);
  }
  return data;
}

bool BoundPages::unmap(std::byte* data, std::size_t bytes) noexcept {
  return upstream_->unmap(data, bytes);
}

bool BoundPages::discard(std::byte* data, std::size_t bytes) noexcept {
  return upstream_->discard(data, bytes);
}

void BoundPages::advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept {
  upstream_->advise_huge(data, used, mapped);
}

void BoundPages::make_resident(std::byte* data, std::size_t bytes) noexcept {
  upstream_->make_resident(data, bytes);
}

void BoundPages::withhold_from_children(std::byte* data, std::size_t bytes) noexcept {
  upstream_->withhold_from_children(data, bytes);
}

void BoundPages::share_with_children(std::byte* data, std::size_t bytes) noexcept {
  upstream_->share_with_children(data, bytes);
}

std::string BoundPages::description() const {
  std::string text = upstream_->description() + ", bound to NUMA node " + std::to_string(os_index_);
  if (const std::size_t refusals = num_refusals_.load(std::memory_order_relaxed); refusals > 0) {
    text += " (refused for " + std::to_string(refusals) + " mapping(s))";
  }
  return text;
}

}  // namespace castor
