#include "core/check_copy.h"

#include <functional>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  const std::less<> before;  // a total order over pointers of different arrays
  return before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

}  // namespace

void check_copy(const CopyRequest& request) {
  if (request.source.size() != request.target.size()) {
    throw InvalidArgument("a copy needs buffers of equal size: the source has " +
                          format_bytes(request.source.size()) + ", the target " +
                          format_bytes(request.target.size()));
  }
  if (!request.source.empty() && overlap(request.source, request.target)) {
    throw InvalidArgument("the source and the target of a copy of " +
                          format_bytes(request.source.size()) + " overlap");
  }
}

}  // namespace castor
