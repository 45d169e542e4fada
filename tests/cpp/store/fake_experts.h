#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "store/expert_model.h"

namespace castor::testing {

/// Model on the heap whose experts are fetched by the row: byte i of parameter n is 100 n + i.
class FakeExperts final : public ExpertModel {
 public:
  explicit FakeExperts(const ChunkLayout& layout) : layout_(layout) {
    for (std::uint32_t i = 0; i < layout.params().size(); ++i) {
      auto& values = host_[i];
      for (std::size_t at = 0; at < layout.param(ParamId{i}).numel * sizeof(float); ++at) {
        values.push_back(static_cast<std::byte>(i * 100 + at));
      }
    }
  }

  [[nodiscard]] bool begin_rows(std::span<const ChunkId> /*chunks*/) override { return rows; }
  [[nodiscard]] bool begin_rows_of_step(std::span<const ChunkId> chunks) override {
    begun.assign(chunks.begin(), chunks.end());
    return rows;
  }
  [[nodiscard]] bool take_written(ChunkId chunk) override { return written.erase(chunk) > 0; }
  [[nodiscard]] const std::byte* on_host(ParamId param) const override {
    return host_.at(static_cast<std::uint32_t>(param)).data();
  }
  [[nodiscard]] std::size_t lasting_bytes() const override { return lasting; }

  void write(ParamId param) {
    for (std::byte& value : host_[static_cast<std::uint32_t>(param)]) {
      value = ~value;
    }
    written.insert(layout_.place(param).chunk);
  }

  bool rows = true;
  std::size_t lasting = 0;
  std::set<ChunkId> written;
  std::vector<ChunkId> begun;  // chunks of the last step's call

 private:
  const ChunkLayout& layout_;
  std::map<std::uint32_t, std::vector<std::byte>> host_;
};

}  // namespace castor::testing
