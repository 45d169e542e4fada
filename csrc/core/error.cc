#include "core/error.h"

#include <cerrno>
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
                       const std::string& what_failed, const std::string& remedy) {
  std::string text = what_failed + " " + path + " at byte " + std::to_string(offset) + ": " +
                     std::generic_category().message(error_number) + " (errno " +
                     std::to_string(error_number) + ")";
  return remedy.empty() ? text : text + ". " + remedy;
}

std::string corruption_message(const std::string& what, const std::string& path,
                               std::uint64_t offset, std::size_t bytes, std::uint64_t expected,
                               std::uint64_t found) {
  return "corrupted data: " + what + " in " + path + " at byte " + std::to_string(offset) + ": " +
         format_bytes(bytes) + " came back with checksum " + hexadecimal(found) +
         ", and were written with " + hexadecimal(expected) +
         ". Check the device (dmesg, smartctl) and the memory, and load the last checkpoint";
}

}  // namespace

OutOfMemory::OutOfMemory(TierKind tier, std::size_t requested, std::size_t available,
                         std::size_t budget, const std::string& remedy)
    : Error(out_of_memory_message(tier, requested, available, budget, remedy)),
      tier_(tier),
      requested_(requested),
      available_(available),
      budget_(budget) {}

OutOfMemory::OutOfMemory(const std::string& message, const OutOfMemory& figures)
    : Error(message),
      tier_(figures.tier_),
      requested_(figures.requested_),
      available_(figures.available_),
      budget_(figures.budget_) {}

OutOfMemory OutOfMemory::with(const std::string& sentence) const {
  return sentence.empty() ? *this : OutOfMemory(std::string(what()) + ". " + sentence, *this);
}

IoError::IoError(int error_number, std::string path, std::uint64_t offset,
                 const std::string& what_failed, const std::string& remedy)
    : Error(io_message(error_number, path, offset, what_failed, remedy)),
      error_number_(error_number),
      path_(std::move(path)),
      offset_(offset) {}

IoError::IoError(int error_number, std::string path, std::uint64_t offset,
                 const WholeMessage& message)
    : Error(message.text), error_number_(error_number), path_(std::move(path)), offset_(offset) {}

CorruptionError::CorruptionError(const std::string& what, std::string path, std::uint64_t offset,
                                 std::size_t bytes, std::uint64_t expected, std::uint64_t found)
    : IoError(EBADMSG, path, offset,
              WholeMessage{corruption_message(what, path, offset, bytes, expected, found)}),
      expected_(expected),
      found_(found) {}

}  // namespace castor
