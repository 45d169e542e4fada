#include "store/expert_rows.h"

#include <string>

#include "core/error.h"

namespace castor {

std::unique_ptr<ExpertRows> ExpertRows::fetch(const ExpertParts& parts, const ExpertLayer& layer,
                                              std::span<const std::int64_t> experts) {
  for (const std::int64_t expert : experts) {
    if (expert < 0 || expert >= layer.num_experts) {
      throw InvalidArgument("expert " + std::to_string(expert) + " of parameter '" +
                            parts.layout.param(layer.params.at(0)).name + "', which has " +
                            std::to_string(layer.num_experts) + " experts");
    }
  }
  if (!parts.model.begin_rows_of_step(layer.chunks(parts.layout))) {
    return nullptr;
  }
  return std::unique_ptr<ExpertRows>(new ExpertRows(parts, layer, experts));
}

std::unique_ptr<ExpertRows> ExpertRows::fetch_ahead(const ExpertParts& parts,
                                                    const ExpertLayer& layer,
                                                    std::span<const std::int64_t> experts) {
  const bool fits = layer.expert_bytes() * experts.size() <= parts.device.available();
  return fits ? fetch(parts, layer, experts) : nullptr;
}

ExpertRows::ExpertRows(const ExpertParts& parts, const ExpertLayer& layer,
                       std::span<const std::int64_t> experts)
    : failures_(layer.params.size()), copies_(parts.copies, parts.compute, layer.params.size()) {
  std::vector<RowCopies::Row> rows;
  for (const std::int64_t expert : experts) {
    rows.push_back({.from = expert, .to = static_cast<std::int64_t>(rows.size())});
  }
  for (std::size_t i = 0; i < layer.params.size(); ++i) {
    memory_.push_back(parts.take(layer.row_bytes[i] * experts.size()));
    bytes_ += copies_.begin(i,
                            {.host = parts.model.on_host(layer.params[i]),
                             .device = memory_[i]->data(),
                             .row_bytes = layer.row_bytes[i]},
                            rows);
  }
}

const std::shared_ptr<DeviceMemory>& ExpertRows::take(std::size_t position) {
  std::exception_ptr& failure = failures_.at(position);
  try {
    copies_.await(position);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
  return memory_[position];
}

}  // namespace castor
