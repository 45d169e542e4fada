#include "core/collectives.h"

namespace castor {

Error lost_ranks(const Collectives& own, const std::string& why) {
  return lost_ranks(own.rank(), own.size(), why);
}

Error lost_ranks(std::size_t rank, std::size_t size, const std::string& why) {
  return Error("rank " + std::to_string(rank) + " of " + std::to_string(size) +
               " lost the others: " + why +
               ". A rank that failed says why in its own output; start all again, from the last "
               "checkpoint");
}

}  // namespace castor
