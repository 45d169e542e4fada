#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "store/expert_cache.h"
#include "store/expert_rows.h"
#include "torch/session.h"

namespace castor {

/// The experts of a session's layers by the row, as tensors that the layers' own forward computes
/// with: an ExpertCache for passes without gradients, ExpertRows for steps. Shares the session.
/// Threads and errors are those of the two.
class TorchExperts final : public std::enable_shared_from_this<TorchExperts>, private ExpertModel {
 public:
  /// Rows of a call's experts, as ExpertCache::Rows.
  struct Cached {
    std::vector<at::Tensor> params;  ///< [num_places, ...]
    std::vector<std::int64_t> places;
    std::int64_t num_places = 0;
  };
  /// Rows of a step's forward or backward; see ExpertRows. Shares the TorchExperts.
  class Rows {
   public:
    Rows(std::shared_ptr<const TorchExperts> experts, std::size_t layer, std::int64_t num_experts,
         std::unique_ptr<ExpertRows> rows)
        : experts_(std::move(experts)),
          layer_(layer),
          num_experts_(num_experts),
          rows_(std::move(rows)) {}
    /// Returns the rows [experts, ...] of a parameter, given by its position.
    [[nodiscard]] at::Tensor take(std::size_t position);
    [[nodiscard]] std::size_t bytes() const noexcept { return rows_->bytes(); }

   private:
    const std::shared_ptr<const TorchExperts> experts_;
    const std::size_t layer_;
    const std::int64_t num_experts_;
    const std::unique_ptr<ExpertRows> rows_;
  };

  /// `layers`: parameters of each layer, in order of execution. The first dimension of each
  /// parameter is the layer's number of experts. Throws InvalidArgument where the parameters of a
  /// layer differ in that, or are not contiguous. A shared_ptr owns this.
  TorchExperts(std::shared_ptr<Session> session, std::span<const std::vector<ParamId>> layers);
  ~TorchExperts() override;
  TorchExperts(const TorchExperts&) = delete;
  TorchExperts& operator=(const TorchExperts&) = delete;

  /// Same as ExpertCache::fetch.
  [[nodiscard]] std::optional<Cached> fetch(std::size_t layer,
                                            std::span<const std::int64_t> experts);
  /// Same as ExpertRows::fetch and ExpertRows::fetch_ahead.
  [[nodiscard]] std::shared_ptr<Rows> rows(std::size_t layer,
                                           std::span<const std::int64_t> experts);
  [[nodiscard]] std::shared_ptr<Rows> rows_ahead(std::size_t layer,
                                                 std::span<const std::int64_t> experts);
  /// Same as Session::gradient_rows_arrived, for a parameter given by its position in the layer.
  void gradient_rows(std::size_t layer, std::size_t position, const at::Tensor& experts,
                     const at::Tensor& gradients) {
    session_->gradient_rows_arrived(layers_.at(layer).params.at(position), experts, gradients);
  }
  /// Same as Runtime::expect_rows_of_step, for the chunks of all layers.
  void expect_rows();
  [[nodiscard]] ExpertCache& cache() noexcept { return cache_; }
  [[nodiscard]] const ExpertCache& cache() const noexcept { return cache_; }

 private:
  [[nodiscard]] ExpertParts parts();
  [[nodiscard]] std::shared_ptr<Rows> shared(std::size_t layer, std::size_t num_experts,
                                             std::unique_ptr<ExpertRows> rows) const;
  [[nodiscard]] std::vector<ExpertLayer> layers_of(
      std::span<const std::vector<ParamId>> layers) const;
  /// Returns a tensor [num_rows, ...] over rows of a parameter, given by its position in the layer.
  [[nodiscard]] at::Tensor tensor_of(std::size_t layer, std::size_t position,
                                     const DeviceMemory& memory, std::int64_t num_rows) const;

  [[nodiscard]] bool begin_rows(std::span<const ChunkId> chunks) override {
    return session_->begin_rows(chunks);
  }
  [[nodiscard]] bool begin_rows_of_step(std::span<const ChunkId> chunks) override {
    return session_->begin_rows_of_step(chunks);
  }
  [[nodiscard]] bool take_written(ChunkId chunk) override { return session_->take_written(chunk); }
  [[nodiscard]] const std::byte* on_host(ParamId param) const override {
    return session_->updates().states().element(param, PayloadKind::kParam);
  }
  [[nodiscard]] std::size_t lasting_bytes() const override {
    return session_->runtime().lasting_bytes() + session_->runtime().bytes_of_others();
  }

  const std::shared_ptr<Session> session_;
  const std::vector<ExpertLayer> layers_;
  ExpertCache cache_;
};

}  // namespace castor
