#include "simulated_copies.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace castor::testing {
namespace {

using Bytes = std::span<const std::byte>;

bool touch(Bytes a, Bytes b) {
  const std::less<> before;
  return before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

/// Calls `visit` for the address of each page of host storage, or of rows of one. Both begin their
/// own pages (MmapArena; rows of tests are whole pages).
template <typename Visit>
void for_each_page(Bytes host, Visit&& visit) {
  for (std::size_t at = 0; at < host.size(); at += page_bytes()) {
    visit(host.data() + at);
  }
}

void set_writable(const std::byte* page, bool writable) {
  if (mprotect(const_cast<std::byte*>(page), page_bytes(),
               writable ? PROT_READ | PROT_WRITE : PROT_READ) != 0) {
    throw std::runtime_error("mprotect refused a page of host storage");
  }
}

}  // namespace

SimulatedCopies::SimulatedCopies(std::uint64_t bytes_per_second)
    : inner_({.bytes_per_second = bytes_per_second,
              .copy = [this](const CopyRequest& request) { run(request); }}) {}

SimulatedCopies::~SimulatedCopies() {
  std::vector<CopyTicket> left;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [ticket, reader] : readers_) {
      left.push_back(ticket);
    }
  }
  for (const CopyTicket ticket : left) {
    try {
      inner_.wait(ticket);
    } catch (...) {  // what failed reads nothing
    }
  }
  known_done(left);
}

CopyTicket SimulatedCopies::submit(const CopyRequest& request) {
  num_copies_[static_cast<std::size_t>(request.direction)].fetch_add(1);
  const bool reads_host =
      request.direction == CopyDirection::kHostToDevice && !request.source.empty();
  CopyRequest watched = request;
  if (reads_host && request.await_source) {
    watched.await_source = [this, await_source = request.await_source] {
      try {
        await_source();
      } catch (...) {
        const std::lock_guard lock(mutex_);
        readers_.erase(next_locked());  // a copy that fails reads nothing
        throw;
      }
    };
  }
  const std::lock_guard lock(mutex_);
  const CopyTicket ticket = inner_.submit(watched);
  if (reads_host) {
    readers_.emplace(ticket, Reader{.source = request.source});
  }
  return ticket;
}

// Of the copies in, which the engine makes in the order of their tickets.
std::map<CopyTicket, SimulatedCopies::Reader>::iterator SimulatedCopies::next_locked() {
  return std::find_if(readers_.begin(), readers_.end(),
                      [](const auto& entry) { return !entry.second.reading; });
}

// On a thread of the engine, after await_source.
void SimulatedCopies::run(const CopyRequest& request) {
  if (request.direction == CopyDirection::kHostToDevice) {
    const std::lock_guard lock(mutex_);
    if (!request.source.empty()) {
      const auto reader = next_locked();
      reader->second.reading = true;
      protect_locked(reader->second.source);
    }
  } else {
    host_writes(request.target);  // the rule of conflicting copies: in the order of submission
  }
  if (!request.source.empty()) {
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }
}

void SimulatedCopies::protect_locked(Bytes source) {
  for_each_page(source, [this](const std::byte* page) {
    if (locks_[page]++ == 0) {
      set_writable(page, false);
    }
  });
}

void SimulatedCopies::release_locked(std::map<CopyTicket, Reader>::iterator reader) {
  if (reader->second.reading) {
    for_each_page(reader->second.source, [this](const std::byte* page) {
      if (--locks_[page] == 0) {
        locks_.erase(page);
        set_writable(page, true);
      }
    });
  }
  readers_.erase(reader);
}

void SimulatedCopies::wait(CopyTicket ticket) {
  inner_.wait(ticket);
  known_done(std::span(&ticket, 1));
}

void SimulatedCopies::order(CopyTicket ticket, StreamId /*stream: the calling thread*/) {
  inner_.wait(ticket);
  const std::lock_guard lock(mutex_);
  if (const auto reader = readers_.find(ticket); reader != readers_.end()) {
    reader->second.waited = true;
  }
}

std::vector<CopyTicket> SimulatedCopies::waited() const {
  const std::lock_guard lock(mutex_);
  std::vector<CopyTicket> tickets;
  for (const auto& [ticket, reader] : readers_) {
    if (reader.waited) {
      tickets.push_back(ticket);
    }
  }
  return tickets;
}

void SimulatedCopies::known_done(std::span<const CopyTicket> tickets) {
  const std::lock_guard lock(mutex_);
  for (const CopyTicket ticket : tickets) {
    if (const auto reader = readers_.find(ticket); reader != readers_.end()) {
      release_locked(reader);
    }
  }
}

void SimulatedCopies::host_writes(Bytes host) {
  for (;;) {
    CopyTicket reading = CopyTicket::kNone;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [ticket, reader] : readers_) {
        if (reader.reading && touch(reader.source, host)) {
          reading = ticket;
        }
      }
    }
    if (reading == CopyTicket::kNone) {
      return;
    }
    inner_.wait(reading);
    known_done(std::span(&reading, 1));
  }
}

}  // namespace castor::testing
