#include "torch/expert_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "torch/torch_device.h"

namespace castor {
namespace {

std::size_t row_bytes(const at::Tensor& full) {
  const std::int64_t num_rows = full.dim() == 0 ? 0 : full.size(0);
  return num_rows == 0 ? 0 : full.nbytes() / static_cast<std::size_t>(num_rows);
}

}  // namespace

std::shared_ptr<ExpertRows> ExpertRows::fetch(std::shared_ptr<Session> session,
                                              std::span<const ParamId> params,
                                              std::span<const std::int64_t> experts) {
  std::vector<ChunkId> chunks;
  for (const ParamId param : params) {
    const at::Tensor& tensor = session->parameter(param);
    const std::int64_t num_rows = tensor.dim() == 0 ? 0 : tensor.size(0);
    for (const std::int64_t expert : experts) {
      if (expert < 0 || expert >= num_rows || !tensor.is_contiguous()) {
        throw InvalidArgument("expert " + std::to_string(expert) + " of parameter '" +
                              session->layout().param(param).name + "', which has " +
                              std::to_string(num_rows) + " rows; they have to be contiguous");
      }
    }
    const ChunkId chunk = session->layout().place(param).chunk;
    if (std::ranges::find(chunks, chunk) == chunks.end()) {
      chunks.push_back(chunk);
    }
  }
  if (!session->begin_rows_of_step(chunks)) {
    return nullptr;
  }
  const std::shared_ptr<ExpertRows> rows(new ExpertRows(std::move(session)));
  for (const ParamId param : params) {
    rows->begin(param, experts);
  }
  return rows;
}

std::shared_ptr<ExpertRows> ExpertRows::fetch_ahead(std::shared_ptr<Session> session,
                                                    std::span<const ParamId> params,
                                                    std::span<const std::int64_t> experts) {
  std::size_t bytes = 0;
  for (const ParamId param : params) {
    const at::Tensor& full = session->parameter(param);
    bytes += row_bytes(full) * experts.size();
  }
  const bool fits = bytes <= session->memory().device_tier()->ledger().available();
  return fits ? fetch(std::move(session), params, experts) : nullptr;
}

void ExpertRows::begin(ParamId param, std::span<const std::int64_t> experts) {
  const at::NoGradGuard no_graph;
  const at::Tensor& full = session_->parameter(param);
  at::DimVector sizes(full.sizes());
  sizes[0] = static_cast<std::int64_t>(experts.size());
  Param& own = params_.emplace_back();
  own.rows = at::empty(
      sizes, at::TensorOptions().dtype(full.scalar_type()).device(session_->torch_device()));
  const std::size_t each = row_bytes(full);
  const std::byte* const source = session_->updates().states().element(param, PayloadKind::kParam);
  auto* const target = static_cast<std::byte*>(own.rows.mutable_data_ptr());
  for (std::size_t i = 0; i < experts.size();) {
    const std::size_t first = i++;
    while (i < experts.size() && experts[i] == experts[i - 1] + 1) {
      ++i;  // consecutive rows are one copy
    }
    const std::size_t bytes = (i - first) * each;
    own.tickets.push_back(session_->chunks().copies().submit(
        {.source = {source + static_cast<std::size_t>(experts[first]) * each, bytes},
         .target = {target + first * each, bytes},
         .direction = CopyDirection::kHostToDevice,
         .behind = session_->memory().device().current_stream(),
         .await_source = {}}));
    bytes_ += bytes;
  }
}

at::Tensor ExpertRows::take(std::size_t position) {
  Param& own = params_.at(position);
  while (!own.tickets.empty()) {
    const CopyTicket ticket = own.tickets.back();
    own.tickets.pop_back();
    session_->chunks().copies().order(ticket, session_->memory().device().current_stream());
  }
  return own.rows;
}

// By threads that hold Python's global lock too.
ExpertRows::~ExpertRows() {
  for (const Param& param : params_) {
    for (const CopyTicket ticket : param.tickets) {
      try {
        session_->chunks().copies().wait(ticket);
      } catch (...) {  // nobody needs the bytes any more
      }
    }
  }
}

}  // namespace castor
