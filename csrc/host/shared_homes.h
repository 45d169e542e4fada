#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "core/memory_tier.h"
#include "host/shared_mapping.h"

namespace castor {

/// Homes that the ranks of a machine have once, in a file that all map.
///
/// Each rank has a view of it, in which it reads and writes as in memory of its own: a page that it
/// has written is a copy that it alone sees (MAP_PRIVATE), all others are the common ones, as they
/// change. What all shall see goes to the common memory, each byte by the rank whose part it is in;
/// copies hide it until they are forgotten. When who does so is the ranks' agreement, not kept
/// here.
///
/// Calls for different bytes may come from different threads.
class SharedHomes {
 public:
  /// Of the first `bytes` of the file, whole pages; it may be closed afterwards. Throws Error where
  /// the system refuses, or does not tell which pages of a process are its own.
  SharedHomes(int file, std::size_t bytes);
  ~SharedHomes();
  SharedHomes(const SharedHomes&) = delete;
  SharedHomes& operator=(const SharedHomes&) = delete;

  /// What a block takes of the file: each begins with a page.
  [[nodiscard]] static std::size_t size_of(std::size_t bytes);

  /// Hands out the view, block behind block: on ranks that ask for the same sizes in the same order
  /// the same are the common ones. May outlive this.
  [[nodiscard]] std::unique_ptr<Arena> make_arena() const;
  [[nodiscard]] bool contains(const std::byte* in_view) const noexcept;
  /// The common memory of a byte of the view.
  [[nodiscard]] std::byte* common(const std::byte* in_view) const noexcept;
  /// This rank's copy of all pages of a block is there, of zeros: a page that is only written need
  /// not be copied from the common one before. Ends when the block is forgotten. Throws Error where
  /// the system refuses, and nothing has changed.
  void begin_copy(std::span<std::byte> block) const;
  /// What this rank has in copies of its own of these bytes of the view becomes the common.
  void publish(std::span<const std::byte> bytes) const;
  /// Forgets this rank's copies of pages that lie wholly in these bytes of the view, of a block
  /// whose copy was not begun; ...
  void forget_within(std::span<std::byte> bytes) const;
  /// ... of all pages of a block.
  void forget(std::span<std::byte> block) const;

 private:
  class View;
  class ViewArena;

  const SharedMapping common_;
  const std::shared_ptr<View> view_;
};

}  // namespace castor
