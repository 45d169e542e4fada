#include "core/collectives.h"

namespace castor {

std::string name_of_rank(std::size_t rank, std::size_t size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

std::string Collectives::name() const { return name_of_rank(rank(), size()); }

std::string Collectives::name_of(std::size_t rank) const { return "rank " + std::to_string(rank); }

Error lost_ranks(const Collectives& own, const std::string& why) {
  return Error(own.name() + " lost the others: " + why +
               ". A rank that failed says why in its own output; start all again, from the last "
               "checkpoint");
}

}  // namespace castor
