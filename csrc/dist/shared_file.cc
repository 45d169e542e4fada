#include "dist/shared_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

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

/// Behind what ranks share, so that each can tell rank 0's file from another one.
struct Seal {
  std::uint64_t token = 0;
};

/// What ranks tell each other before they share a file.
struct Invitation {
  std::array<char, 64> machine{};    ///< of this boot of it
  std::array<char, 64> processes{};  ///< in which process numbers mean something
  std::int32_t process = 0;
  std::int32_t file = -1;  ///< rank 0's
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

/// Why ranks that said so cannot share memory; "": they can.
std::string apart(std::span<const Invitation> all) {
  for (const Invitation& other : all) {
    if (other.machine != all[0].machine) {
      return "ranks run on several machines";
    }
    if (other.processes != all[0].processes || other.machine[0] == '\0') {
      return "ranks run in several containers";
    }
  }
  return all[0].file < 0 ? "rank 0 was refused shared memory" : "";
}

/// Rank 0's file; `refusal` says why there is none.
UniqueFd open_file(const Invitation& first, std::size_t bytes, std::string& refusal) {
  const std::string path =
      "/proc/" + std::to_string(first.process) + "/fd/" + std::to_string(first.file);
  UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) {
    refusal = failed("opening rank 0's memory");
    return file;
  }
  struct stat found {};
  Seal seal;
  if (::fstat(file.get(), &found) != 0 ||
      static_cast<std::size_t>(found.st_size) != bytes + sizeof(Seal) ||
      ::pread(file.get(), &seal, sizeof(Seal), static_cast<off_t>(bytes)) != sizeof(Seal) ||
      seal.token != first.seal.token) {
    refusal = "rank 0's memory is not there";
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

SharedFile share_file(Collectives& group, std::size_t bytes) {
  SharedFile shared;
  Invitation own;
  copy_text(first_line("/proc/sys/kernel/random/boot_id"), own.machine);
  copy_text(target_of("/proc/self/ns/pid"), own.processes);
  own.process = ::getpid();
  if (group.rank() == 0) {
    std::random_device random;
    own.seal.token = (std::uint64_t{random()} << 32) | random();
    shared.file = UniqueFd(make_shared_file(bytes + sizeof(Seal)));
    if (shared.file && ::pwrite(shared.file.get(), &own.seal, sizeof(Seal),
                                static_cast<off_t>(bytes)) == sizeof(Seal)) {
      own.file = shared.file.get();
    }
  }
  const std::vector<Invitation> all = gather(group, own);
  std::string refusal = apart(all);
  if (refusal.empty() && group.rank() != 0) {
    shared.file = open_file(all[0], bytes, refusal);
  }
  shared.refusal = any_refusal(group, refusal);  // rank 0's stays open until all have it
  if (!shared.refusal.empty()) {
    shared.file.reset();
  }
  for (const Invitation& other : all) {
    shared.processes.push_back(other.process);
  }
  return shared;
}

HomesOfRanks share_homes(Collectives& group, std::size_t bytes) {
  SharedFile shared = share_file(group, bytes);
  if (!shared.refusal.empty()) {
    return {.homes = nullptr, .refusal = std::move(shared.refusal)};
  }
  HomesOfRanks result;
  std::string refusal;
  try {
    result.homes = std::make_unique<SharedHomes>(shared.file.get(), bytes);
  } catch (const Error& error) {
    refusal = error.what();
  }
  result.refusal = any_refusal(group, refusal);
  if (!result.refusal.empty()) {
    result.homes.reset();
  }
  return result;
}

}  // namespace castor
