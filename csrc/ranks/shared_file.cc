#include "ranks/shared_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <random>
#include <span>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "host/shared_mapping.h"

namespace castor {
namespace {

/// Behind what ranks share, so that each can tell the first one's file from another.
struct Seal {
  std::uint64_t token = 0;
};

/// By which ranks tell whether they are on one machine.
struct Whereabouts {
  std::array<char, 64> machine{};    ///< of this boot of it
  std::array<char, 64> processes{};  ///< in which process numbers mean something
  std::array<char, 64> mark{};

  [[nodiscard]] bool same_machine(const Whereabouts& other) const {
    return machine == other.machine && mark == other.mark;
  }
  [[nodiscard]] bool near(const Whereabouts& other) const {
    return same_machine(other) && processes == other.processes && machine[0] != '\0';
  }
};

/// What ranks tell each other before they share a file.
struct Invitation {
  std::int32_t process = 0;
  std::int32_t file = -1;  ///< of the machine's first rank
  Seal seal;
};

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string target_of(const char* path) {
  std::array<char, 64> target{};
  const ssize_t length = ::readlink(path, target.data(), target.size() - 1);
  return length > 0 ? std::string(target.data(), static_cast<std::size_t>(length)) : std::string();
}

template <std::size_t n>
void copy_text(const std::string& text, std::array<char, n>& to) {
  to[text.copy(to.data(), n - 1)] = '\0';
}

std::string failed(const std::string& what) {
  return what + " failed: " + std::generic_category().message(errno);
}

/// Whether a machine's ranks are each `size` in a row.
bool in_rows(std::span<const Whereabouts> all, std::size_t size) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (std::size_t other = 0; other < rank; ++other) {
      if (all[rank].near(all[other]) != (rank / size == other / size)) {
        return false;
      }
    }
  }
  return all.size() % size == 0;
}

/// The file that the machine's first rank has told of; `refusal` says why there is none.
UniqueFd open_file(std::size_t rank, const Invitation& first, std::size_t bytes,
                   std::string& refusal) {
  const std::string whose = "rank " + std::to_string(rank);
  if (first.file < 0) {
    refusal = whose + " was refused shared memory";
    return {};
  }
  const std::string path =
      "/proc/" + std::to_string(first.process) + "/fd/" + std::to_string(first.file);
  UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) {
    refusal = failed("opening " + whose + "'s memory");
    return file;
  }
  struct stat found {};
  Seal seal;
  if (::fstat(file.get(), &found) != 0 ||
      static_cast<std::size_t>(found.st_size) != bytes + sizeof(Seal) ||
      ::pread(file.get(), &seal, sizeof(Seal), static_cast<off_t>(bytes)) != sizeof(Seal) ||
      seal.token != first.seal.token) {
    refusal = whose + "'s memory is not there";
  }
  return file;
}

}  // namespace

std::string any_refusal(Collectives& group, const std::string& own) {
  std::array<char, 128> text{};
  copy_text(own, text);
  for (const auto& other : gather(group, text)) {
    if (other[0] != '\0') {
      return other.data();
    }
  }
  return "";
}

Nodes find_nodes(Collectives& group, const std::string& mark) {
  Whereabouts own;
  copy_text(first_line("/proc/sys/kernel/random/boot_id"), own.machine);
  copy_text(target_of("/proc/self/ns/pid"), own.processes);
  copy_text(mark, own.mark);
  const std::vector<Whereabouts> all = gather(group, own);
  const auto row_end = std::find_if(all.begin() + 1, all.end(),
                                    [&](const Whereabouts& other) { return !other.near(all[0]); });
  const auto size = static_cast<std::size_t>(row_end - all.begin());
  const bool regular = in_rows(all, size);
  if (regular && size > 1) {
    return {.size = size, .refusal = ""};
  }
  const bool one_machine = std::all_of(
      all.begin(), all.end(), [&](const Whereabouts& one) { return one.same_machine(all[0]); });
  const std::string apart =
      one_machine ? "ranks run in several containers" : "ranks run on several machines";
  return {.size = 1, .refusal = apart + (regular ? "" : ", and not as many on each, in a row")};
}

SharedFile share_file(Collectives& group, std::size_t node, std::size_t bytes) {
  SharedFile shared;
  Invitation own;
  own.process = ::getpid();
  const std::size_t first = group.rank() / node * node;
  if (group.rank() == first) {
    std::random_device random;
    own.seal.token = (std::uint64_t{random()} << 32) | random();
    shared.file = UniqueFd(make_shared_file(bytes + sizeof(Seal)));
    if (shared.file && ::pwrite(shared.file.get(), &own.seal, sizeof(Seal),
                                static_cast<off_t>(bytes)) == sizeof(Seal)) {
      own.file = shared.file.get();
    }
  }
  const std::vector<Invitation> all = gather(group, own);
  std::string refusal;
  if (group.rank() != first) {
    shared.file = open_file(first, all[first], bytes, refusal);
  }
  shared.refusal = any_refusal(group, refusal);  // the first's stays open until all have it
  if (!shared.refusal.empty()) {
    shared.file.reset();
  }
  for (const Invitation& other : std::span(all).subspan(first, node)) {
    shared.processes.push_back(other.process);
  }
  return shared;
}

NodeHostStorage share_host_storage(Collectives& group, std::size_t node, std::size_t bytes,
                                   const SharedHostStorage::LockPages& lock_pages) {
  SharedFile shared = share_file(group, node, bytes);
  if (!shared.refusal.empty()) {
    return {.storage = nullptr, .refusal = std::move(shared.refusal)};
  }
  NodeHostStorage result;
  std::string refusal;
  try {
    result.storage = lock_pages
                         ? std::make_unique<SharedHostStorage>(shared.file.get(), bytes, lock_pages)
                         : std::make_unique<SharedHostStorage>(shared.file.get(), bytes);
  } catch (const Error& error) {
    refusal = error.what();
  }
  result.refusal = any_refusal(group, refusal);
  if (!result.refusal.empty()) {
    result.storage.reset();
  }
  return result;
}

}  // namespace castor
