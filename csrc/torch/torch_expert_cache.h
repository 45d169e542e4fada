#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "store/expert_cache.h"
#include "torch/session.h"

namespace castor {

/// The ExpertCache of a session, with rows as tensors that the layers' own forward computes with.
/// Shares the session. Threads and errors are those of ExpertCache.
class TorchExpertCache final : private ExpertCache::Model {
 public:
  /// Rows of a call's experts, as ExpertCache::Rows.
  struct Rows {
    std::vector<at::Tensor> params;  ///< [num_places, ...]
    std::vector<std::int64_t> places;
    std::int64_t num_places = 0;
  };

  /// `layers`: parameters of each layer, in order of execution. The first dimension of each
  /// parameter is the layer's number of experts. Throws InvalidArgument where the parameters of a
  /// layer differ in that, or are not contiguous.
  TorchExpertCache(std::shared_ptr<Session> session, std::vector<std::vector<ParamId>> layers);
  ~TorchExpertCache() override;
  TorchExpertCache(const TorchExpertCache&) = delete;
  TorchExpertCache& operator=(const TorchExpertCache&) = delete;

  [[nodiscard]] std::optional<Rows> fetch(std::size_t layer, std::span<const std::int64_t> experts);
  [[nodiscard]] ExpertCache& cache() noexcept { return cache_; }
  [[nodiscard]] const ExpertCache& cache() const noexcept { return cache_; }

 private:
  [[nodiscard]] std::vector<ExpertCache::LayerSpec> specs() const;
  [[nodiscard]] bool begin_rows(std::span<const ChunkId> chunks) override {
    return session_->begin_rows(chunks);
  }
  [[nodiscard]] bool take_written(ChunkId chunk) override { return session_->take_written(chunk); }
  [[nodiscard]] const std::byte* on_host(ParamId param) const override {
    return session_->updates().states().element(param, PayloadKind::kParam);
  }
  [[nodiscard]] std::size_t lasting_bytes() const override {
    return session_->runtime().lasting_bytes() + session_->runtime().bytes_of_others();
  }

  const std::shared_ptr<Session> session_;
  const std::vector<std::vector<ParamId>> layers_;
  ExpertCache cache_;
};

}  // namespace castor
