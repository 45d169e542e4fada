#include "core/error.h"

#include <system_error>
#include <utility>

#include "core/units.h"

namespace castor {
namespace {

std::string out_of_memory_message(TierKind tier, std::size_t requested, std::size_t available,
                                  std::size_t budget, const std::string& remedy) {
  std::string text = "out of " + std::string(to_string(tier)) + " memory: requested " +
                     format_bytes(requested) + ", available " + format_bytes(available) +
                     " of a budget of " + format_bytes(budget);
  return remedy.empty() ? text : text + ". " + remedy;
}

std::string io_message(int error_number, const std::string& path, std::uint64_t offset,
                       const std::string& what_failed) {
  return what_failed + " " + path + " at byte " + std::to_string(offset) + ": " +
         std::generic_category().message(error_number) + " (errno " + std::to_string(error_number) +
         ")";
}

}  // namespace

OutOfMemory::OutOfMemory(TierKind tier, std::size_t requested, std::size_t available,
                         std::size_t budget, const std::string& remedy)
    : Error(out_of_memory_message(tier, requested, available, budget, remedy)),
      tier_(tier),
      requested_(requested),
      available_(available),
      budget_(budget) {}

IoError::IoError(int error_number, std::string path, std::uint64_t offset,
                 const std::string& what_failed)
    : Error(io_message(error_number, path, offset, what_failed)),
      error_number_(error_number),
      path_(std::move(path)),
      offset_(offset) {}

}  // namespace castor
