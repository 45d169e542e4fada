#include "store/lockable_bytes.h"

#include "core/error.h"
#include "core/units.h"
#include "host/page_source.h"

namespace castor {
namespace {

constexpr int kRefinements = 4;  // each halves what is not known

bool locks(DeviceBackend& backend, std::size_t bytes) {
  OsPages pages;
  std::byte* const data = pages.map(bytes, system_page_sizes().page);
  if (data == nullptr) {
    return false;
  }
  bool locked = true;
  try {
    static_cast<void>(backend.lock_pages({data, bytes}));
  } catch (const Error&) {
    locked = false;
  }
  static_cast<void>(pages.unmap(data, bytes));
  return locked;
}

}  // namespace

std::size_t lockable_bytes(DeviceBackend& backend, std::size_t wanted) {
  const std::size_t page = system_page_sizes().page;
  std::size_t refused = align_up(wanted, page);
  if (refused == 0 || locks(backend, refused)) {
    return refused;
  }
  std::size_t granted = refused / 2 / page * page;
  while (granted > 0 && !locks(backend, granted)) {
    refused = granted;
    granted = granted / 2 / page * page;
  }
  for (int i = 0; i < kRefinements; ++i) {
    const std::size_t between = granted + (refused - granted) / 2 / page * page;
    if (between == granted) {
      break;
    }
    (locks(backend, between) ? granted : refused) = between;
  }
  return granted;
}

}  // namespace castor
