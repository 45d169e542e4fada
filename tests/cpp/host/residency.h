#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <fstream>
#include <stdexcept>
#include <string>

#include "core/units.h"
#include "host/page_source.h"

namespace castor::testing {

/// Bytes of the pages of [data, data + bytes) that are in physical memory; unmapped ones count 0.
/// `data` is a page boundary.
inline std::size_t resident_bytes(std::byte* data, std::size_t bytes) {
  const std::size_t page = system_page_sizes().page;
  std::size_t resident = 0;
  for (std::size_t offset = 0; offset < bytes; offset += page) {
    unsigned char state = 0;
    if (::mincore(data + offset, page, &state) == 0 && (state & 1U) != 0) {
      resident += page;
    }
  }
  return resident;
}

/// Resident memory of this process. From smaps, which walks the page tables: the counters of
/// /proc/self/statm lag behind.
inline std::size_t process_resident_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  while (file >> word) {
    if (word == "Rss:") {
      std::size_t kib = 0;
      file >> kib;
      return kib * kKiB;
    }
  }
  throw std::runtime_error("no Rss in /proc/self/smaps_rollup");
}

}  // namespace castor::testing
