#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "core/mutex.h"
#include "core/nonmodel_memory.h"

namespace castor {

/// Live allocations that accounts pay for, by address. For an allocator whose pointers cannot carry
/// the account with them. Thread-safe.
class ChargedAllocations {
 public:
  struct Charge {
    std::shared_ptr<NonModelMemory> account;  ///< nullptr: nobody pays
    std::size_t bytes = 0;

    /// Gives back what the account has paid.
    void give_back() const noexcept {
      if (account) {
        account->free(bytes);
      }
    }
  };

  /// Notes who pays for the allocation at `data`, which has no charge yet.
  void add(void* data, Charge charge);
  /// Removes and returns the charge of `data`; one without account when nobody pays.
  Charge take(void* data) noexcept;

 private:
  static constexpr std::size_t kNumShards = 16;

  /// Charges by address, without a node of its own for each: nodes between tensors would cost
  /// torch's allocations more time than they cost us. Open addressing, at most half full.
  class Table {
   public:
    void insert(void* data, Charge charge);
    Charge take(void* data) noexcept;

   private:
    struct Entry {
      void* data = nullptr;
      Charge charge;
    };

    [[nodiscard]] std::size_t mask() const noexcept { return entries_.size() - 1; }
    [[nodiscard]] std::size_t next(std::size_t i) const noexcept { return (i + 1) & mask(); }
    /// Returns the entry at which a search for `data` begins.
    [[nodiscard]] std::size_t first_of(const void* data) const noexcept;
    /// Returns the entry where `data` is, or would be. Requires a free entry.
    [[nodiscard]] std::size_t find(const void* data) const noexcept;
    void grow();

    std::vector<Entry> entries_;  // a power of two
    std::size_t size_ = 0;
  };

  /// The latest charges, in the few cache lines that every allocation uses. Most tensors of a step
  /// are gone before their charge leaves for the table, whose entries are seldom in any cache.
  class Recent {
   public:
    /// Adds a charge. Where there is no room, an earlier one leaves for `table`.
    void insert(void* data, Charge charge, Table& table);
    /// Moves the charge of `data` to `charge`. Returns false if it is not here.
    [[nodiscard]] bool take(void* data, Charge& charge) noexcept;

   private:
    static constexpr std::size_t kNumEntries = 8;

    /// Returns the entry of `data`, or a free one for nullptr; kNumEntries: there is none.
    [[nodiscard]] std::size_t find(const void* data) const noexcept;

    std::array<void*, kNumEntries> data_{};  // nullptr: free
    std::array<Charge, kNumEntries> charges_;
    std::size_t leaves_next_ = 0;
  };
  struct Shard {
    Mutex mutex;
    Recent recent CASTOR_GUARDED_BY(mutex);
    Table charges CASTOR_GUARDED_BY(mutex);
  };

  [[nodiscard]] Shard& shard_of(void* data) noexcept;

  std::array<Shard, kNumShards> shards_;
};

}  // namespace castor
