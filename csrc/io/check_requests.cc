#include "io/check_requests.h"

#include <string>

#include "core/error.h"

namespace castor {

void check_requests(std::span<const IoRequest> requests, std::size_t num_files,
                    std::size_t in_flight, std::size_t queue_depth) {
  if (requests.size() > queue_depth - in_flight) {
    throw InvalidArgument("an I/O engine of depth " + std::to_string(queue_depth) + " has " +
                          std::to_string(in_flight) + " transfers in flight and cannot take " +
                          std::to_string(requests.size()) + " more: collect some first");
  }
  for (const IoRequest& request : requests) {
    if (request.file >= num_files) {
      throw InvalidArgument("an I/O request names file " + std::to_string(request.file) +
                            " and the engine has " + std::to_string(num_files));
    }
    if (request.buffer.empty()) {
      throw InvalidArgument("an I/O request at byte " + std::to_string(request.offset) +
                            " has an empty buffer");
    }
  }
}

}  // namespace castor
