#include "store/charged_allocations.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace castor {
namespace {

/// Addresses are multiples of 64 and often of 4096: what is taken of one is mixed before.
std::size_t mixed(const void* data) noexcept {
  return (reinterpret_cast<std::uintptr_t>(data) >> 6) * 0x9E3779B97F4A7C15ULL >> 32;
}

}  // namespace

void ChargedAllocations::add(void* data, Charge charge) {
  Shard& shard = shard_of(data);
  const MutexLock lock(shard.mutex);
  shard.recent.insert(data, std::move(charge), shard.charges);
}

ChargedAllocations::Charge ChargedAllocations::take(void* data) noexcept {
  Shard& shard = shard_of(data);
  const MutexLock lock(shard.mutex);
  Charge charge;
  if (!shard.recent.take(data, charge)) {
    charge = shard.charges.take(data);
  }
  return charge;
}

ChargedAllocations::Shard& ChargedAllocations::shard_of(void* data) noexcept {
  return shards_[mixed(data) % kNumShards];
}

void ChargedAllocations::Recent::insert(void* data, Charge charge, Table& table) {
  std::size_t entry = find(nullptr);
  if (entry == kNumEntries) {
    table.insert(data_[leaves_next_], charges_[leaves_next_]);
    entry = std::exchange(leaves_next_, (leaves_next_ + 1) % kNumEntries);
  }
  data_[entry] = data;
  charges_[entry] = std::move(charge);
}

bool ChargedAllocations::Recent::take(void* data, Charge& charge) noexcept {
  const std::size_t entry = data == nullptr ? kNumEntries : find(data);
  if (entry == kNumEntries) {
    return false;
  }
  charge = std::exchange(charges_[entry], {});
  data_[entry] = nullptr;
  return true;
}

std::size_t ChargedAllocations::Recent::find(const void* data) const noexcept {
  return static_cast<std::size_t>(std::find(data_.begin(), data_.end(), data) - data_.begin());
}

void ChargedAllocations::Table::insert(void* data, Charge charge) {
  if (2 * (size_ + 1) > entries_.size()) {
    grow();
  }
  Entry& entry = entries_[find(data)];
  size_ += entry.data == nullptr ? 1 : 0;
  entry = {data, std::move(charge)};
}

ChargedAllocations::Charge ChargedAllocations::Table::take(void* data) noexcept {
  if (size_ == 0) {
    return {};
  }
  std::size_t hole = find(data);
  if (entries_[hole].data == nullptr) {
    return {};
  }
  Charge charge = std::move(entries_[hole].charge);
  // What stands behind the hole and was looked for from before it moves up, so that no search ends
  // too soon.
  for (std::size_t i = next(hole); entries_[i].data != nullptr; i = next(i)) {
    const std::size_t first = first_of(entries_[i].data);
    if (((i - first) & mask()) >= ((i - hole) & mask())) {
      entries_[hole] = std::move(entries_[i]);
      hole = i;
    }
  }
  entries_[hole] = {};
  --size_;
  return charge;
}

// Shards take the low bits of what is mixed.
std::size_t ChargedAllocations::Table::first_of(const void* data) const noexcept {
  return mixed(data) / kNumShards & mask();
}

std::size_t ChargedAllocations::Table::find(const void* data) const noexcept {
  std::size_t i = first_of(data);
  while (entries_[i].data != nullptr && entries_[i].data != data) {
    i = next(i);
  }
  return i;
}

void ChargedAllocations::Table::grow() {
  std::vector<Entry> before(std::max<std::size_t>(2 * entries_.size(), 16));
  before.swap(entries_);
  for (Entry& entry : before) {
    if (entry.data != nullptr) {
      entries_[find(entry.data)] = std::move(entry);
    }
  }
}

}  // namespace castor
