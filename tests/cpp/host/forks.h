#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <functional>
#include <stdexcept>

namespace castor::testing {

/// A sanitizer's own memory may lie, in a child, where a block was: what is mapped there then says
/// nothing about the block.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kMappingsTell = false;
#else
inline constexpr bool kMappingsTell = true;
#endif

/// What `body` returns in a child that is forked now: 0 to 99.
inline int in_forked_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(body());
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) {
      throw std::runtime_error("waitpid failed");
    }
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

/// Whether the page at `data` belongs to any mapping of this process. `data` is a page boundary.
inline bool is_mapped(std::byte* data, std::size_t page) {
  unsigned char state = 0;
  return ::mincore(data, page, &state) == 0;
}

}  // namespace castor::testing
