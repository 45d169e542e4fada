#include "core/collectives.h"

namespace castor {

Error lost_ranks(const Collectives& own, const std::string& why) {
  return Error("rank " + std::to_string(own.rank()) + " of " + std::to_string(own.size()) +
               " lost the others: " + why +
               ". A rank that failed says why in its own output; start all again, from the last "
               "checkpoint");
}

}  // namespace castor
