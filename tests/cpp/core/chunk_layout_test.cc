#include "core/chunk_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

constexpr std::array<std::size_t, 5> kWorldSizes = {1, 2, 3, 4, 8};

struct Model {
  std::vector<ParamSpec> params;
  std::vector<ModuleSpec> modules;

  ParamId add_param(std::size_t numel, ScalarType type, bool trainable = true) {
    params.push_back({"p" + std::to_string(params.size()), numel, type, trainable});
    return static_cast<ParamId>(params.size() - 1);
  }

  ModuleId add_module(std::vector<ParamId> own, std::optional<ModuleId> parent = std::nullopt) {
    modules.push_back({"m" + std::to_string(modules.size()), std::move(own), parent});
    return static_cast<ModuleId>(modules.size() - 1);
  }

  // A module with parameters of its own, of `numels` elements.
  ModuleId add(std::initializer_list<std::size_t> numels, ScalarType type,
               std::optional<ModuleId> parent = std::nullopt) {
    std::vector<ParamId> own;
    for (const std::size_t numel : numels) {
      own.push_back(add_param(numel, type));
    }
    return add_module(std::move(own), parent);
  }

  [[nodiscard]] ChunkLayout layout(std::size_t chunk_bytes = 0, std::size_t world_size = 1) const {
    return ChunkLayout(params, modules, {.chunk_bytes = chunk_bytes, .world_size = world_size});
  }
};

std::size_t bytes_of(const ParamSpec& param) { return param.numel * size_of(param.type); }

std::size_t param_bytes(const Model& model) {
  std::size_t bytes = 0;
  for (const ParamSpec& param : model.params) {
    bytes += bytes_of(param);
  }
  return bytes;
}

// The device bytes that chunk_layout.h promises the search keeps to.
double reserve_bytes(const Model& model) {
  std::size_t largest = 0;
  for (const ModuleSpec& module : model.modules) {
    std::size_t bytes = 0;
    for (const ParamId id : std::set<ParamId>(module.params.begin(), module.params.end())) {
      bytes += bytes_of(model.params[index(id)]);
    }
    largest = std::max(largest, bytes);
  }
  return std::max(0.35 * static_cast<double>(param_bytes(model)),
                  2.2 * static_cast<double>(largest));
}

// Architectures, as their Hugging Face implementations execute them.

Model gpt2(std::size_t layers, std::size_t width, std::size_t vocab, std::size_t positions,
           ScalarType type) {
  Model model;
  const ParamId wte = model.add_param(vocab * width, type);
  model.add_module({wte});
  model.add({positions * width}, type);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    model.add({width, width}, type);
    model.add({width * 3 * width, 3 * width}, type);
    model.add({width * width, width}, type);
    model.add({width, width}, type);
    model.add({width * 4 * width, 4 * width}, type);
    model.add({4 * width * width, width}, type);
  }
  model.add({width, width}, type);
  model.add_module({wte});  // lm_head is tied
  return model;
}

Model llama(std::size_t layers, std::size_t width, std::size_t kv_width, std::size_t inner,
            std::size_t vocab, ScalarType type) {
  Model model;
  model.add({vocab * width}, type);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    model.add({width}, type);
    model.add({width * width}, type);
    model.add({width * kv_width}, type);
    model.add({width * kv_width}, type);
    model.add({width * width}, type);
    model.add({width}, type);
    model.add({width * inner}, type);
    model.add({width * inner}, type);
    model.add({inner * width}, type);
  }
  model.add({width}, type);
  model.add({vocab * width}, type);
  return model;
}

// BertForMaskedLM: the head's bias is its own, its weight that of the word embedding.
Model bert(std::size_t layers, std::size_t width, ScalarType type) {
  constexpr std::size_t kVocab = 30522;
  Model model;
  const ParamId words = model.add_param(kVocab * width, type);
  model.add_module({words});
  model.add({2 * width}, type);
  model.add({512 * width}, type);
  model.add({width, width}, type);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (int linear = 0; linear < 4; ++linear) {
      model.add({width * width, width}, type);
    }
    model.add({width, width}, type);
    model.add({width * 4 * width, 4 * width}, type);
    model.add({4 * width * width, width}, type);
    model.add({width, width}, type);
  }
  model.add({width * width, width}, type);
  model.add({width, width}, type);
  model.add_module({words, model.add_param(kVocab, type)});
  return model;
}

Model t5_small(ScalarType type) {
  constexpr std::size_t kWidth = 512;
  Model model;
  const ParamId shared = model.add_param(32128 * kWidth, type);
  model.add_module({shared});
  const auto attention = [&](bool has_position_bias) {
    model.add({kWidth}, type);
    for (int linear = 0; linear < 3; ++linear) {
      model.add({kWidth * kWidth}, type);
    }
    if (has_position_bias) {
      model.add({32 * 8}, type);
    }
    model.add({kWidth * kWidth}, type);
  };
  for (const bool is_decoder : {false, true}) {
    for (int layer = 0; layer < 6; ++layer) {
      attention(layer == 0);
      if (is_decoder) {
        attention(false);
      }
      model.add({kWidth}, type);
      model.add({kWidth * 2048}, type);
      model.add({2048 * kWidth}, type);
    }
    model.add({kWidth}, type);
  }
  model.add_module({shared});
  return model;
}

// All experts of a layer in two tensors of one module.
Model mixtral_tiny(ScalarType type) {
  constexpr std::size_t kWidth = 256;
  constexpr std::size_t kKvWidth = 64;
  constexpr std::size_t kInner = 512;
  constexpr std::size_t kExperts = 8;
  constexpr std::size_t kVocab = 4000;
  Model model;
  model.add({kVocab * kWidth}, type);
  for (int layer = 0; layer < 4; ++layer) {
    model.add({kWidth}, type);
    model.add({kWidth * kWidth}, type);
    model.add({kWidth * kKvWidth}, type);
    model.add({kWidth * kKvWidth}, type);
    model.add({kWidth * kWidth}, type);
    model.add({kWidth}, type);
    model.add({kExperts * kWidth}, type);
    model.add({kExperts * 2 * kInner * kWidth, kExperts * kWidth * kInner}, type);
  }
  model.add({kWidth}, type);
  model.add({kVocab * kWidth}, type);
  return model;
}

struct Architecture {
  const char* name;
  std::function<Model(ScalarType)> make;
};

void PrintTo(const Architecture& architecture, std::ostream* out) { *out << architecture.name; }

const std::array<Architecture, 13> kArchitectures = {{
    {"gpt2_small", [](ScalarType type) { return gpt2(12, 768, 50257, 1024, type); }},
    {"gpt2_medium", [](ScalarType type) { return gpt2(24, 1024, 50257, 1024, type); }},
    {"gpt2_xl", [](ScalarType type) { return gpt2(48, 1600, 50257, 1024, type); }},
    {"gpt2_42m", [](ScalarType type) { return gpt2(12, 512, 8192, 1024, type); }},
    {"gpt2_200k", [](ScalarType type) { return gpt2(2, 64, 1000, 512, type); }},
    {"gpt_100b", [](ScalarType type) { return gpt2(80, 10240, 50257, 2048, type); }},
    {"llama_7b", [](ScalarType type) { return llama(32, 4096, 4096, 11008, 32000, type); }},
    {"llama_70b", [](ScalarType type) { return llama(80, 8192, 1024, 28672, 32000, type); }},
    {"llama_8b_gqa", [](ScalarType type) { return llama(32, 4096, 1024, 14336, 128256, type); }},
    {"bert_base", [](ScalarType type) { return bert(12, 768, type); }},
    {"bert_large", [](ScalarType type) { return bert(24, 1024, type); }},
    {"t5_small", t5_small},
    {"mixtral_tiny", mixtral_tiny},
}};

// Everything chunk_layout.h promises of any layout, computed again in the plainest way.
void expect_sound(const Model& model, const ChunkLayout& layout, std::size_t world_size) {
  const std::size_t unit = kParamAlignment * world_size;
  ASSERT_EQ(layout.params().size(), model.params.size());
  ASSERT_EQ(layout.modules().size(), model.modules.size());
  EXPECT_EQ(layout.chunk_bytes() % unit, 0u);
  EXPECT_GE(layout.chunk_bytes(), unit);

  std::vector<int> times_placed(model.params.size(), 0);
  std::size_t used_bytes = 0;
  std::size_t slot_bytes = 0;
  std::array<std::optional<std::size_t>, 32> last_shared;  // 8 of each type
  std::set<ParamId> needed;
  for (const ModuleSpec& module : model.modules) {
    needed.insert(module.params.begin(), module.params.end());
  }
  ParamId previous_first{};
  for (std::size_t c = 0; c < layout.chunks().size(); ++c) {
    const ChunkSpec& chunk = layout.chunks()[c];
    ASSERT_FALSE(chunk.params.empty());
    EXPECT_TRUE(std::is_sorted(chunk.params.begin(), chunk.params.end()));
    EXPECT_TRUE(c == 0 || previous_first < chunk.params.front()) << "ids follow execution order";
    previous_first = chunk.params.front();

    std::size_t end = 0;
    for (const ParamId id : chunk.params) {
      const ParamSpec& param = model.params[index(id)];
      ++times_placed[index(id)];
      EXPECT_EQ(layout.place(id).chunk, static_cast<ChunkId>(c));
      EXPECT_EQ(param.type, chunk.type);
      EXPECT_EQ(param.trainable, chunk.trainable);
      EXPECT_EQ(param.trainable && param.has_state, chunk.has_state);
      EXPECT_EQ(!model.modules.empty() && !needed.contains(id), chunk.read_on_host);
      EXPECT_EQ(layout.place(id).offset * size_of(param.type), end) << "gap or overlap";
      end = align_up(end + bytes_of(param), kParamAlignment);
    }
    EXPECT_EQ(chunk.used_bytes, std::max(align_up(end, unit), unit));
    EXPECT_LE(chunk.used_bytes, chunk.capacity_bytes);
    EXPECT_EQ(chunk.capacity_bytes % unit, 0u);
    EXPECT_EQ(chunk.capacity_bytes / world_size % kParamAlignment, 0u);
    used_bytes += chunk.used_bytes;
    slot_bytes += chunk.capacity_bytes;

    const std::size_t first_bytes = bytes_of(model.params[index(chunk.params.front())]);
    if (first_bytes > layout.chunk_bytes()) {
      EXPECT_EQ(chunk.params.size(), 1u);
      EXPECT_EQ(chunk.capacity_bytes, align_up(first_bytes, unit));
      continue;
    }
    // A shared chunk closes only when the next parameter of its class does not fit.
    auto& last = last_shared[8 * static_cast<std::size_t>(chunk.type) + (chunk.trainable ? 4 : 0) +
                             (chunk.has_state ? 2 : 0) + (chunk.read_on_host ? 1 : 0)];
    if (last.has_value()) {
      const ChunkSpec& closed = layout.chunks()[*last];
      const ParamId end_id = closed.params.back();
      const std::size_t closed_end = align_up(layout.place(end_id).offset * size_of(closed.type) +
                                                  bytes_of(model.params[index(end_id)]),
                                              kParamAlignment);
      EXPECT_GT(closed_end + first_bytes, layout.chunk_bytes());
      EXPECT_EQ(closed.capacity_bytes, layout.chunk_bytes());
    }
    last = c;
  }
  for (const auto& last : last_shared) {
    if (last.has_value()) {
      EXPECT_EQ(layout.chunks()[*last].capacity_bytes, layout.chunks()[*last].used_bytes);
    }
  }
  EXPECT_EQ(times_placed, std::vector<int>(model.params.size(), 1));
  EXPECT_EQ(layout.used_bytes(), used_bytes);
  EXPECT_DOUBLE_EQ(layout.waste(), static_cast<double>(slot_bytes - param_bytes(model)) /
                                       static_cast<double>(slot_bytes));

  std::size_t largest = 0;
  ModuleId largest_module{};
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    std::set<ChunkId> own;
    for (const ParamId id : model.modules[m].params) {
      own.insert(layout.place(id).chunk);
    }
    EXPECT_EQ(layout.chunks_of(static_cast<ModuleId>(m)),
              std::vector<ChunkId>(own.begin(), own.end()));
    std::set<ChunkId> pinned;
    std::optional<ModuleId> at = static_cast<ModuleId>(m);
    for (; at.has_value(); at = model.modules[index(*at)].parent) {
      for (const ParamId id : model.modules[index(*at)].params) {
        pinned.insert(layout.place(id).chunk);
      }
    }
    std::size_t bytes = 0;
    for (const ChunkId id : pinned) {
      bytes += layout.chunk(id).capacity_bytes;
    }
    if (bytes > largest) {
      largest = bytes;
      largest_module = static_cast<ModuleId>(m);
    }
  }
  EXPECT_EQ(layout.largest_working_set_bytes(), largest);
  EXPECT_EQ(layout.largest_module(), largest_module);
}

TEST(ChunkLayoutTest, FillsTheOpenChunkInOrderAndAlignsEachParameter) {
  Model model;
  const ParamId a = model.add_param(1, ScalarType::kFloat32);
  const ParamId b = model.add_param(17, ScalarType::kFloat32);  // 68 bytes: two lines
  const ParamId c = model.add_param(16, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 1u);
  EXPECT_EQ(layout.place(a).offset, 0u);
  EXPECT_EQ(layout.place(b).offset, 16u);
  EXPECT_EQ(layout.place(c).offset, 48u);
  EXPECT_EQ(layout.chunks()[0].used_bytes, 256u);
  EXPECT_EQ(layout.chunks()[0].capacity_bytes, 256u);
  EXPECT_DOUBLE_EQ(layout.waste(), (256.0 - 136.0) / 256.0);
  expect_sound(model, layout, 1);
}

TEST(ChunkLayoutTest, CountsOffsetsInElementsOfTheChunkType) {
  Model model;
  model.add_param(33, ScalarType::kBFloat16);  // 66 bytes: two lines
  const ParamId second = model.add_param(32, ScalarType::kBFloat16);
  EXPECT_EQ(model.layout(256).place(second).offset, 64u);
}

TEST(ChunkLayoutTest, ClosesTheChunkThatCannotHoldTheNextParameter) {
  Model model;
  const ParamId a = model.add_param(48, ScalarType::kFloat32);
  const ParamId b = model.add_param(32, ScalarType::kFloat32);
  const ParamId c = model.add_param(16, ScalarType::kFloat32);  // would have fitted beside a
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 2u);
  EXPECT_EQ(layout.chunks()[0].params, (std::vector<ParamId>{a}));
  EXPECT_EQ(layout.chunks()[1].params, (std::vector<ParamId>{b, c}));
  EXPECT_EQ(layout.chunks()[0].capacity_bytes, 256u);
  EXPECT_EQ(layout.chunks()[0].used_bytes, 192u);
  EXPECT_EQ(layout.chunks()[1].capacity_bytes, 192u) << "the last chunk ends with its parameters";
}

TEST(ChunkLayoutTest, FillsAChunkToTheLastByte) {
  Model model;
  model.add_param(32, ScalarType::kFloat32);
  model.add_param(32, ScalarType::kFloat32);
  model.add_param(1, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 2u);
  EXPECT_EQ(layout.chunks()[0].params.size(), 2u);
  EXPECT_EQ(layout.chunks()[1].capacity_bytes, 64u);
}

TEST(ChunkLayoutTest, OversizedParameterHasItsOwnChunkAndLeavesTheOpenOneOpen) {
  Model model;
  const ParamId before = model.add_param(16, ScalarType::kFloat32);
  const ParamId large = model.add_param(65, ScalarType::kFloat32);  // 260 bytes
  const ParamId after = model.add_param(16, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 2u);
  EXPECT_EQ(layout.chunks()[0].params, (std::vector<ParamId>{before, after}));
  EXPECT_EQ(layout.chunks()[1].params, (std::vector<ParamId>{large}));
  EXPECT_EQ(layout.chunks()[1].capacity_bytes, 320u);
  expect_sound(model, layout, 1);
}

TEST(ChunkLayoutTest, ParametersBeginAtTheAlignmentAskedFor) {
  constexpr std::size_t kAlignment = 512;
  Model model;
  model.add({100, 3, 0, 257}, ScalarType::kBFloat16);
  model.add({4096, 1}, ScalarType::kBFloat16);
  for (const std::size_t world_size : kWorldSizes) {
    const ChunkLayout layout(
        model.params, model.modules,
        {.chunk_bytes = 4096, .world_size = world_size, .param_alignment = kAlignment});
    std::size_t used = 0;
    for (const ChunkSpec& chunk : layout.chunks()) {
      EXPECT_EQ(chunk.capacity_bytes % (kAlignment * world_size), 0u);
      EXPECT_EQ(chunk.used_bytes % (kAlignment * world_size), 0u);
      used += chunk.used_bytes;
    }
    for (std::size_t i = 0; i < model.params.size(); ++i) {
      EXPECT_EQ(layout.place(static_cast<ParamId>(i)).offset * 2 % kAlignment, 0u);
    }
    // 512 for 100 and for 3 elements, none for 0, 1024 for 257, 8192 for 4096, 512 for 1.
    if (world_size == 1) {
      EXPECT_EQ(used, 512u + 512u + 1024u + 8192u + 512u);
    }
  }
}

TEST(ChunkLayoutTest, AlignmentThatDoesNotKeepParametersAlignedIsRefused) {
  Model model;
  model.add({100}, ScalarType::kBFloat16);
  for (const std::size_t alignment : {std::size_t{0}, std::size_t{32}, std::size_t{96}, 2 * kMiB}) {
    EXPECT_THROW(ChunkLayout(model.params, model.modules, {.param_alignment = alignment}),
                 InvalidArgument)
        << alignment;
  }
}

TEST(ChunkLayoutTest, OversizedChunkIsAlignedToTheWorld) {
  Model model;
  model.add_param(65, ScalarType::kFloat32);
  EXPECT_EQ(model.layout(192, 3).chunks()[0].capacity_bytes, 384u);
}

TEST(ChunkLayoutTest, ParameterOfExactlyTheCapacityIsNotOversized) {
  Model model;
  model.add_param(16, ScalarType::kFloat32);
  model.add_param(64, ScalarType::kFloat32);
  model.add_param(16, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout(256);
  EXPECT_EQ(layout.chunks().size(), 3u) << "an oversized one would have left the first chunk open";
}

TEST(ChunkLayoutTest, TiedModulesShareTheChunk) {
  Model model;
  const ParamId tied = model.add_param(64, ScalarType::kFloat32);
  const ModuleId embedding = model.add_module({tied});
  model.add({64}, ScalarType::kFloat32);
  const ModuleId head = model.add_module({tied});
  const ChunkLayout layout = model.layout(256);
  EXPECT_EQ(layout.chunks().size(), 2u);
  EXPECT_EQ(layout.chunks_of(embedding), layout.chunks_of(head));
  expect_sound(model, layout, 1);
}

TEST(ChunkLayoutTest, ParameterListedTwiceInAModuleCountsOnce) {
  Model model;
  const ParamId shared = model.add_param(64, ScalarType::kFloat32);
  const ModuleId module = model.add_module({shared, shared});
  const ChunkLayout layout = model.layout(256);
  EXPECT_EQ(layout.chunks_of(module).size(), 1u);
  EXPECT_EQ(layout.largest_working_set_bytes(), 256u);
}

TEST(ChunkLayoutTest, FrozenAndTrainableNeverShareAChunk) {
  Model model;
  model.add_param(16, ScalarType::kFloat32, true);
  model.add_param(16, ScalarType::kFloat32, false);
  model.add_param(16, ScalarType::kFloat32, true);
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 2u);
  EXPECT_TRUE(layout.chunks()[0].trainable);
  EXPECT_EQ(layout.chunks()[0].params.size(), 2u);
  EXPECT_FALSE(layout.chunks()[1].trainable);
  EXPECT_EQ(layout.chunks()[1].capacity_bytes, 64u);
}

TEST(ChunkLayoutTest, WithAndWithoutStatesNeverShareAChunk) {
  Model model;
  for (const bool has_state : {true, false, true, false}) {
    model.params[index(model.add_param(16, ScalarType::kFloat32))].has_state = has_state;
  }
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 2u);
  EXPECT_TRUE(layout.chunks()[0].has_state);
  EXPECT_FALSE(layout.chunks()[1].has_state);
  EXPECT_TRUE(layout.chunks()[1].trainable);
  expect_sound(model, layout, 1);
}

TEST(ChunkLayoutTest, WhatNoModuleNeedsNeverSharesAChunkWithWhatOneNeeds) {
  Model model;
  model.add({4}, ScalarType::kFloat32);
  const ParamId apart = model.add_param(4, ScalarType::kFloat32);
  model.add_module({});
  model.add({4}, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout(4 * kKiB);
  ASSERT_EQ(layout.chunks().size(), 2U);
  const ChunkId chunk = layout.place(apart).chunk;
  EXPECT_EQ(layout.chunk(chunk).params, std::vector{apart});
  EXPECT_TRUE(layout.chunk(chunk).read_on_host);
  EXPECT_FALSE(layout.chunk(layout.place(ParamId{0}).chunk).read_on_host);
  EXPECT_EQ(layout.place(ParamId{0}).chunk, layout.place(ParamId{2}).chunk);
  EXPECT_TRUE(layout.chunks_of(ModuleId{1}).empty());
}

TEST(ChunkLayoutTest, TypesNeverShareAChunk) {
  Model model;
  for (const ScalarType type :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
    model.add_param(16, type);
  }
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 3u);
  EXPECT_EQ(layout.chunks()[0].type, ScalarType::kFloat32);
  EXPECT_EQ(layout.chunks()[1].type, ScalarType::kBFloat16);
  EXPECT_EQ(layout.chunks()[2].type, ScalarType::kFloat16);
}

TEST(ChunkLayoutTest, PackedBytesHaveChunksOfTheirOwnAndAreFrozen) {
  Model model;
  model.add_param(16, ScalarType::kFloat32, false);
  model.add_param(33, ScalarType::kUInt8, false);
  const ParamId last = model.add_param(1, ScalarType::kUInt8, false);
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 2u);
  EXPECT_EQ(layout.chunks()[1].type, ScalarType::kUInt8);
  EXPECT_EQ(layout.chunks()[1].used_bytes, 128u);
  EXPECT_EQ(layout.place(last).offset, 64u);
  model.params[index(last)].trainable = true;
  EXPECT_THROW((void)model.layout(256), InvalidArgument);
}

TEST(ChunkLayoutTest, EmptyParameterTakesNoBytesEvenInAFullChunk) {
  Model model;
  model.add_param(64, ScalarType::kFloat32);
  const ParamId empty = model.add_param(0, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout(256);
  ASSERT_EQ(layout.chunks().size(), 1u);
  EXPECT_EQ(layout.place(empty).offset, 64u) << "the end of its chunk";
  EXPECT_EQ(layout.chunks()[0].capacity_bytes, 256u);
  EXPECT_EQ(layout.waste(), 0.0);
}

TEST(ChunkLayoutTest, ChunkOfEmptyParametersStillHasASlot) {
  for (const std::size_t world_size : kWorldSizes) {
    Model model;
    model.add_module({model.add_param(0, ScalarType::kFloat32)});
    const ChunkLayout layout = model.layout(0, world_size);
    ASSERT_EQ(layout.chunks().size(), 1u);
    EXPECT_EQ(layout.chunks()[0].capacity_bytes, 64 * world_size);
    EXPECT_EQ(layout.chunks()[0].used_bytes, 64 * world_size);
    EXPECT_EQ(layout.waste(), 1.0);
    expect_sound(model, layout, world_size);
  }
}

TEST(ChunkLayoutTest, WorkingSetHoldsTheChunksOfEnclosingModulesOnce) {
  Model model;
  const ModuleId root = model.add({64}, ScalarType::kFloat32);
  const ModuleId block = model.add({64, 16}, ScalarType::kFloat32, root);
  const ModuleId leaf = model.add({16, 64}, ScalarType::kFloat32, block);
  model.add({64}, ScalarType::kFloat32, root);
  const ChunkLayout layout = model.layout(256);
  // Chunks: root | block | block's and leaf's small ones | leaf | the sibling.
  ASSERT_EQ(layout.chunks().size(), 5u);
  EXPECT_EQ(layout.largest_module(), leaf);
  EXPECT_EQ(layout.largest_working_set_bytes(), 4 * 256u);
  expect_sound(model, layout, 1);
}

TEST(ChunkLayoutTest, ParentMayComeAfterItsChild) {
  Model model;
  const ModuleId child = model.add({64}, ScalarType::kFloat32, static_cast<ModuleId>(1));
  model.add({64}, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout(256);
  EXPECT_EQ(layout.largest_module(), child);
  EXPECT_EQ(layout.largest_working_set_bytes(), 512u);
}

TEST(ChunkLayoutTest, EqualModulesReportTheFirst) {
  Model model;
  const ModuleId root = model.add_module({});
  const ModuleId first = model.add({64}, ScalarType::kFloat32);
  model.add({64}, ScalarType::kFloat32, root);
  EXPECT_EQ(model.layout(256).largest_module(), first);
}

TEST(ChunkLayoutTest, NoModulesMeansNoWorkingSet) {
  Model model;
  model.add_param(1 << 20, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout();
  EXPECT_EQ(layout.largest_working_set_bytes(), 0u);
  EXPECT_EQ(layout.largest_module(), ModuleId{0});
}

TEST(ChunkLayoutTest, DeepNestingDoesNotRecurse) {
  Model model;
  std::optional<ModuleId> parent;
  for (int depth = 0; depth < 20000; ++depth) {
    parent = model.add({16}, ScalarType::kFloat32, parent);
  }
  const ChunkLayout layout = model.layout(64);
  EXPECT_EQ(layout.largest_module(), *parent);
  EXPECT_EQ(layout.largest_working_set_bytes(), 20000 * 64u);
}

TEST(ChunkLayoutTest, ChunkBytesIsRoundedDownToEqualShards) {
  Model model;
  model.add_param(1000, ScalarType::kFloat32);
  EXPECT_EQ(model.layout(1000, 3).chunk_bytes(), 960u);
  EXPECT_EQ(model.layout(960, 3).chunk_bytes(), 960u);
  EXPECT_EQ(model.layout(192, 3).chunk_bytes(), 192u) << "the least allowed";
}

TEST(ChunkLayoutTest, ChunkBytesAboveTheModelGiveOneChunkOfTheModelsSize) {
  const Model model = gpt2(2, 64, 1000, 512, ScalarType::kFloat32);
  for (const std::size_t chunk_bytes :
       {std::size_t{kGiB}, std::numeric_limits<std::size_t>::max()}) {
    const ChunkLayout layout = model.layout(chunk_bytes);
    ASSERT_EQ(layout.chunks().size(), 1u);
    EXPECT_EQ(layout.chunks()[0].capacity_bytes, param_bytes(model));
    EXPECT_EQ(layout.waste(), 0.0);
  }
}

TEST(ChunkLayoutTest, RejectsAnEmptyModel) {
  EXPECT_THROW((void)Model().layout(), InvalidArgument);
}

TEST(ChunkLayoutTest, RejectsAnEmptyOrAbsurdWorld) {
  Model model;
  model.add_param(16, ScalarType::kFloat32);
  EXPECT_THROW((void)model.layout(0, 0), InvalidArgument);
  EXPECT_THROW((void)model.layout(0, (1u << 20) + 1), InvalidArgument);
  EXPECT_THROW((void)model.layout(0, std::numeric_limits<std::size_t>::max()), InvalidArgument);
  EXPECT_EQ(model.layout(0, 1u << 20).chunk_bytes(), 64 * kMiB);
}

TEST(ChunkLayoutTest, RejectsChunkBytesBelowOneLinePerProcess) {
  Model model;
  model.add_param(16, ScalarType::kFloat32);
  EXPECT_THROW((void)model.layout(63), InvalidArgument);
  EXPECT_THROW((void)model.layout(255, 4), InvalidArgument);
  EXPECT_NO_THROW((void)model.layout(256, 4));
}

TEST(ChunkLayoutTest, RejectsIdsOutOfRangeAndNamesTheModule) {
  Model model;
  model.add_param(16, ScalarType::kFloat32);
  model.add_module({static_cast<ParamId>(1)});
  try {
    (void)model.layout();
    FAIL() << "no throw";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "module 'm0' lists parameter 1, but the model has 1");
  }
  model.modules.clear();
  model.add_module({}, static_cast<ModuleId>(1));
  EXPECT_THROW((void)model.layout(), InvalidArgument);
}

TEST(ChunkLayoutTest, RejectsModulesThatEncloseEachOther) {
  Model model;
  model.add({16}, ScalarType::kFloat32);
  model.add({16}, ScalarType::kFloat32, static_cast<ModuleId>(2));
  model.add({16}, ScalarType::kFloat32, static_cast<ModuleId>(1));
  EXPECT_THROW((void)model.layout(), InvalidArgument);
  model.modules[1].parent = static_cast<ModuleId>(1);
  EXPECT_THROW((void)model.layout(), InvalidArgument);
}

TEST(ChunkLayoutTest, RejectsSizesThatWouldWrap) {
  for (const std::size_t numel :
       {std::numeric_limits<std::size_t>::max(), std::numeric_limits<std::size_t>::max() / 4 + 1,
        (std::size_t{1} << 58) + 1}) {
    Model model;
    model.add_param(numel, ScalarType::kFloat32);
    EXPECT_THROW((void)model.layout(), InvalidArgument);
  }
  Model model;
  model.add_param(std::size_t{1} << 58, ScalarType::kFloat32);
  EXPECT_EQ(model.layout().chunks()[0].capacity_bytes, std::size_t{1} << 60);
  model.add_param(1, ScalarType::kFloat32);
  EXPECT_THROW((void)model.layout(), InvalidArgument) << "the sum is too large";
}

TEST(ChunkLayoutTest, LookupsOutOfRangeThrow) {
  Model model;
  model.add({16}, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout();
  EXPECT_THROW((void)layout.place(static_cast<ParamId>(1)), std::out_of_range);
  EXPECT_THROW((void)layout.chunk(static_cast<ChunkId>(1)), std::out_of_range);
  EXPECT_THROW((void)layout.chunks_of(static_cast<ModuleId>(1)), std::out_of_range);
}

TEST(ChunkLayoutTest, RandomModelsKeepEveryInvariant) {
  std::mt19937 random(20240607);
  const auto below = [&](std::size_t bound) {
    return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random);
  };
  for (int round = 0; round < 400; ++round) {
    Model model;
    const std::size_t num_params = 1 + below(120);
    const std::size_t largest = std::size_t{1} << below(16);
    const std::size_t num_types = 1 + below(4);
    for (std::size_t i = 0; i < num_params; ++i) {
      const std::size_t numel = below(12) == 0 ? 0 : 1 + below(largest);
      const auto type = static_cast<ScalarType>(below(num_types));
      model.add_param(numel, type, below(5) != 0 && type != ScalarType::kUInt8);
    }
    const std::size_t num_modules = below(40);
    for (std::size_t i = 0; i < num_modules; ++i) {
      std::vector<ParamId> own(below(6));
      for (ParamId& id : own) {
        id = static_cast<ParamId>(below(num_params));
      }
      std::optional<ModuleId> parent;
      if (i > 0 && below(2) == 0) {
        parent = static_cast<ModuleId>(below(i));
      }
      model.add_module(std::move(own), parent);
    }
    for (const std::size_t world_size : kWorldSizes) {
      const std::size_t least = kParamAlignment * world_size;
      const std::size_t chunk_bytes =
          below(3) == 0 ? 0 : least + below(std::size_t{1} << below(18));
      SCOPED_TRACE("round " + std::to_string(round) + ", chunk_bytes " +
                   std::to_string(chunk_bytes) + ", world_size " + std::to_string(world_size));
      expect_sound(model, model.layout(chunk_bytes, world_size), world_size);
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST(ChunkLayoutSearchTest, ChoosesTheKnownSizes) {
  const ChunkLayout small = gpt2(12, 512, 8192, 1024, ScalarType::kFloat32).layout();
  EXPECT_EQ(small.chunk_bytes(), 8409088u);
  EXPECT_EQ(small.chunks().size(), 20u);
  EXPECT_EQ(small.largest_working_set_bytes(), std::size_t{8192} * 512 * 4);
  const ChunkLayout large = llama(32, 4096, 4096, 11008, 32000, ScalarType::kBFloat16).layout();
  EXPECT_EQ(large.chunk_bytes(), 33570816u);
  EXPECT_EQ(large.chunks().size(), 226u);
  EXPECT_EQ(large.largest_working_set_bytes(), std::size_t{32000} * 4096 * 2);
}

TEST(ChunkLayoutSearchTest, CapacityIsWhatTheFullestSharedChunkUses) {
  for (const Architecture& architecture : kArchitectures) {
    const ChunkLayout layout = architecture.make(ScalarType::kFloat32).layout();
    std::size_t fullest = 0;
    for (const ChunkSpec& chunk : layout.chunks()) {
      if (chunk.used_bytes <= layout.chunk_bytes()) {
        fullest = std::max(fullest, chunk.used_bytes);
      }
    }
    EXPECT_EQ(layout.chunk_bytes(), fullest) << architecture.name;
  }
}

TEST(ChunkLayoutSearchTest, GivesTheLayoutOfItsSize) {
  const Model model = bert(12, 768, ScalarType::kFloat32);
  const ChunkLayout searched = model.layout();
  const ChunkLayout fixed = model.layout(searched.chunk_bytes());
  EXPECT_EQ(searched.waste(), fixed.waste());
  EXPECT_EQ(searched.largest_working_set_bytes(), fixed.largest_working_set_bytes());
  EXPECT_EQ(searched.chunks().size(), fixed.chunks().size());
}

TEST(ChunkLayoutSearchTest, TinyModelIsOneChunk) {
  Model model;
  model.add({100, 10}, ScalarType::kFloat32);
  model.add({100, 10}, ScalarType::kFloat32);
  const ChunkLayout layout = model.layout();
  EXPECT_EQ(layout.chunks().size(), 1u) << "below 4 KiB nothing is gained by streaming";
  EXPECT_EQ(layout.chunk_bytes(), 1024u);
}

TEST(ChunkLayoutSearchTest, CutsAModelIntoSixteenthsWhereTheReserveAllows) {
  // 64 modules of 64 KiB: half the reserve of 0.35 * 4 MiB would hold 11 of them in one slot.
  Model model;
  for (int i = 0; i < 64; ++i) {
    model.add({16 * 1024}, ScalarType::kFloat32);
  }
  const ChunkLayout layout = model.layout();
  EXPECT_EQ(layout.chunk_bytes(), 4 * 64 * kKiB);
  EXPECT_EQ(layout.chunks().size(), 16u);
  EXPECT_EQ(layout.waste(), 0.0);
}

TEST(ChunkLayoutSearchTest, TakesTheLargestSizeThatLeavesHalfTheReserve) {
  // Again 64 modules of 64 KiB, but the third encloses the fourth, which encloses the fifth, ...:
  // eight in all. Half the reserve holds 11. Slots of four or three modules make the eight take the
  // room of twelve; slots of two waste nothing.
  Model model;
  std::optional<ModuleId> parent;
  for (int i = 0; i < 64; ++i) {
    if (i >= 2 && i < 10) {
      parent = model.add({16 * 1024}, ScalarType::kFloat32, parent);
    } else {
      model.add({16 * 1024}, ScalarType::kFloat32);
    }
  }
  const ChunkLayout layout = model.layout();
  EXPECT_EQ(layout.chunk_bytes(), 2 * 64 * kKiB);
  EXPECT_EQ(layout.largest_working_set_bytes(), 8 * 64 * kKiB);
  EXPECT_EQ(layout.waste(), 0.0);
}

TEST(ChunkLayoutSearchTest, TakesTheWholeReserveWhereHalfOfItCannotHoldAModule) {
  // A root that owns 512 KiB, around leaves of 64 and 60 to 62 KiB: each leaf's working set is
  // above half of the reserve (1.1 * 512 KiB) and, at slots of two leaves, within all of it. Slots
  // below 60 KiB would waste nothing; the larger ones stay within 3%.
  Model model;
  const ModuleId root = model.add({128 * 1024}, ScalarType::kFloat32);
  for (int i = 0; i < 8; ++i) {
    for (const std::size_t kib : {64, 62, 64, 60}) {
      model.add({kib * kKiB / 4}, ScalarType::kFloat32, root);
    }
  }
  const ChunkLayout layout = model.layout();
  EXPECT_EQ(layout.chunk_bytes(), (64 + 62) * kKiB);
  EXPECT_EQ(layout.largest_working_set_bytes(), (512 + 64 + 62) * kKiB);
  EXPECT_GT(512.0 * kKiB + 64.0 * kKiB, reserve_bytes(model) / 2) << "no slot leaves half";
  EXPECT_LE(static_cast<double>(layout.largest_working_set_bytes()), reserve_bytes(model));
  EXPECT_GT(layout.waste(), 0.0);
  EXPECT_LE(layout.waste(), 0.03);
}

TEST(ChunkLayoutSearchTest, TakesTheSmallestWorkingSetWhereNoneFitsTheReserve) {
  // Eight modules, each inside the other, hold half of the model between them, and modules that
  // run alone lie between theirs: any slot for two parameters doubles what is resident.
  Model model;
  std::optional<ModuleId> parent;
  for (int i = 0; i < 8; ++i) {
    parent = model.add({64 * 1024}, ScalarType::kFloat32, parent);
    model.add({64 * 1024}, ScalarType::kFloat32);
  }
  const ChunkLayout layout = model.layout();
  EXPECT_GT(static_cast<double>(layout.largest_working_set_bytes()), reserve_bytes(model));
  EXPECT_EQ(layout.largest_working_set_bytes(), 8 * 256 * kKiB);
  EXPECT_EQ(layout.chunk_bytes(), 256 * kKiB);
}

TEST(ChunkLayoutSearchTest, WastesLeastWhereEverySizeWastesTooMuch) {
  // Parameters of 4 bytes in lines of 64: no size wastes less than 15/16.
  Model model;
  for (int i = 0; i < 4096; ++i) {
    model.add({1}, ScalarType::kFloat32);
  }
  const ChunkLayout layout = model.layout();
  EXPECT_DOUBLE_EQ(layout.waste(), 15.0 / 16.0);
  EXPECT_LE(static_cast<double>(layout.largest_working_set_bytes()), reserve_bytes(model));
  EXPECT_EQ(layout.chunk_bytes(), 5 * kKiB + 5 * kKiB / 10) << "the largest of equals";
}

using Case = std::tuple<Architecture, ScalarType, std::size_t>;

class ArchitectureTest : public testing::TestWithParam<Case> {};

TEST_P(ArchitectureTest, StreamsInHalfTheReserveAndWastesLittle) {
  const auto& [architecture, type, world_size] = GetParam();
  const Model model = architecture.make(type);
  const ChunkLayout layout = model.layout(0, world_size);
  EXPECT_LE(layout.waste(), 0.03);
  EXPECT_LE(2.0 * static_cast<double>(layout.largest_working_set_bytes()), reserve_bytes(model));
  EXPECT_GE(layout.chunks().size(), 8u);
  EXPECT_LE(layout.chunk_bytes(), 64 * kMiB);
  expect_sound(model, layout, world_size);
}

INSTANTIATE_TEST_SUITE_P(All, ArchitectureTest,
                         testing::Combine(testing::ValuesIn(kArchitectures),
                                          testing::Values(ScalarType::kFloat32,
                                                          ScalarType::kBFloat16),
                                          testing::ValuesIn(kWorldSizes)),
                         [](const testing::TestParamInfo<Case>& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::string(to_string(std::get<1>(info.param))) + "_world" +
                                  std::to_string(std::get<2>(info.param));
                         });

}  // namespace
}  // namespace castor
