#include "store/row_copies.h"

#include <exception>
#include <utility>

namespace castor {

std::size_t RowCopies::begin(std::size_t position, const Param& param, std::span<const Row> rows) {
  for (std::size_t i = 0; i < rows.size();) {
    const Row first = rows[i];
    std::int64_t count = 0;
    while (i < rows.size() && rows[i].from == first.from + count &&
           rows[i].to == first.to + count) {
      ++count;
      ++i;
    }
    const std::size_t bytes = static_cast<std::size_t>(count) * param.row_bytes;
    const std::size_t source = static_cast<std::size_t>(first.from) * param.row_bytes;
    const std::size_t target = static_cast<std::size_t>(first.to) * param.row_bytes;
    tickets_.at(position).push_back(copies_->submit({.source = {param.host + source, bytes},
                                                     .target = {param.device + target, bytes},
                                                     .direction = CopyDirection::kHostToDevice,
                                                     .behind = compute_->current_stream(),
                                                     .await_source = {}}));
  }
  return rows.size() * param.row_bytes;
}

void RowCopies::await(std::size_t position) {
  std::exception_ptr failure;
  for (const CopyTicket ticket : std::exchange(tickets_.at(position), {})) {
    try {
      copies_->order(ticket, compute_->current_stream());
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void RowCopies::wait() noexcept {
  for (std::vector<CopyTicket>& tickets : tickets_) {
    for (const CopyTicket ticket : std::exchange(tickets, {})) {
      try {
        copies_->wait(ticket);
      } catch (...) {  // nobody needs the bytes any more
      }
    }
  }
}

}  // namespace castor
