#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "core/memory_tier.h"
#include "host/shared_mapping.h"

namespace castor {

/// Host storage of chunks that the ranks of a machine keep once, in a file that all of them map.
///
/// Each rank has a private view of the file (MAP_PRIVATE), which it reads and writes like memory of
/// its own. A page that the rank has written is a copy that this rank alone sees. Every other page
/// is the common one, and shows what is written to it.
///
/// Bytes for all ranks go to the common memory, and each byte is written there by the rank whose
/// shard it is in. A rank's copy hides the common page until the rank forgets the copy. The ranks
/// agree on when to write and to forget; this class does not order them.
///
/// A device copies from page-locked memory, and the system would copy a locked page of a private
/// view at once. So there is no view where pages are locked: the arena hands out the common memory,
/// and copies of a rank's own are blocks of another tier (Payload::take_copy).
///
/// Calls for different bytes may come from different threads.
class SharedHostStorage {
 public:
  /// Function that locks the pages for a device until the returned object goes. Throws Error.
  using LockPages = std::function<std::shared_ptr<void>(std::span<std::byte>)>;

  /// Maps the first `bytes` of the file, which are whole pages; the file may be closed afterwards.
  /// Throws Error where the system refuses, or does not tell which pages of a process are its own.
  SharedHostStorage(int file, std::size_t bytes);
  /// Makes storage without a view, of page-locked memory. Throws Error where the system, or
  /// `lock_pages`, refuses.
  SharedHostStorage(int file, std::size_t bytes, const LockPages& lock_pages);
  ~SharedHostStorage();
  SharedHostStorage(const SharedHostStorage&) = delete;
  SharedHostStorage& operator=(const SharedHostStorage&) = delete;

  /// Returns the bytes that a block takes of the file: each block begins with a page.
  [[nodiscard]] static std::size_t size_of(std::size_t bytes);

  /// Makes an arena that hands out the view, or the common memory where there is none, block behind
  /// block. Ranks that ask for the same sizes in the same order get blocks over the same common
  /// memory. The arena may outlive this object.
  [[nodiscard]] std::unique_ptr<Arena> make_arena() const;
  /// Returns all of the common memory.
  [[nodiscard]] std::span<std::byte> all() const noexcept;
  /// Returns whether the arena's memory has this byte.
  [[nodiscard]] bool contains(const std::byte* in_view) const noexcept;
  /// Returns the address, in the common memory, of a byte of the arena's memory.
  [[nodiscard]] std::byte* common(const std::byte* in_view) const noexcept;
  // The next four have no effect where there is no view.
  /// Gives this rank a copy, of zeros, of all pages of a block. A page that is only written then
  /// need not be copied from the common one before. The copy ends when the block is forgotten.
  /// Throws Error where the system refuses, and nothing has changed.
  void begin_copy(std::span<std::byte> block) const;
  /// Writes these bytes of the view to the common memory, where this rank has copies of their
  /// pages.
  void publish(std::span<const std::byte> bytes) const;
  /// Forgets this rank's copies of the pages that lie wholly in these bytes of the view. The bytes
  /// must not be of a block on which begin_copy() was called.
  void forget_within(std::span<std::byte> bytes) const;
  /// Forgets this rank's copies of all pages of a block.
  void forget(std::span<std::byte> block) const;

 private:
  struct Common;
  class CommonArena;
  class View;
  class ViewArena;

  const std::shared_ptr<Common> common_;
  const std::shared_ptr<View> view_;  // nullptr: pages are locked
};

}  // namespace castor
