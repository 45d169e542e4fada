#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/ids.h"
#include "core/scalar_type.h"
#include "core/units.h"

namespace castor {

/// A parameter as the layout sees it. Tied weights appear once: the caller lists each tensor once,
/// in execution order.
struct ParamSpec {
  std::string name;
  std::size_t numel = 0;
  ScalarType type = ScalarType::kFloat32;
  bool trainable = true;
  /// Whether the update rule updates the parameter and keeps states of it; of no effect where the
  /// parameter is frozen.
  bool has_state = true;
  /// Whether a pass may read single rows of the parameter on the host, in place of the chunk.
  bool by_row = false;
};

/// A module that owns parameters: the unit that must be resident at one time. `parent` is the
/// nearest enclosing module that owns parameters too: its chunks stay pinned while this one runs.
struct ModuleSpec {
  std::string name;
  std::vector<ParamId> params;  ///< parameters that it needs on the device
  std::optional<ModuleId> parent;
};

/// Place of a parameter. `offset` is in elements from the start of its chunk.
struct ParamPlace {
  ChunkId chunk{};
  std::size_t offset = 0;
};

/// Contiguous block of parameters of one type. All of them are trainable or all frozen, all have
/// optimizer states or none has, all are needed on the device by some module or all by none, and
/// all are read by the row or none is.
/// capacity_bytes is the size of a device slot for the chunk. used_bytes (<= capacity_bytes) is the
/// size of its payloads, up to the end of the last parameter. Both are positive multiples of
/// world_size * param_alignment, so that equal shards stay aligned.
struct ChunkSpec {
  ScalarType type = ScalarType::kFloat32;
  bool trainable = true;
  bool has_state = true;      ///< never true of a frozen chunk
  bool read_on_host = false;  ///< whether no module needs it on the device
  bool by_row = false;        ///< whether passes may read single rows of it on the host
  std::size_t capacity_bytes = 0;
  std::size_t used_bytes = 0;
  std::vector<ParamId> params;

  /// Returns whether several ranks update their shards of the chunk each, and none the full chunk.
  [[nodiscard]] bool updated_in_shards() const noexcept { return has_state || !trainable; }
};

struct LayoutOptions {
  /// Most bytes that a shared slot may take; 0: the layout searches for a size. Capacities are the
  /// largest multiple of world_size * param_alignment that is not above it;
  /// ChunkLayout::chunk_bytes() tells which.
  std::size_t chunk_bytes = 0;
  std::size_t world_size = 1;
  /// Alignment of every parameter within its chunk, in bytes: kParamAlignment, or a multiple of it
  /// up to 1 MiB where the optimizer's state comes in blocks of elements.
  std::size_t param_alignment = kParamAlignment;
};

/// Layout of a model in chunks, in execution order. Immutable; safe to read from any thread. Chunks
/// share one capacity, with two exceptions. A parameter larger than the capacity has a chunk of its
/// own. The last shared chunk of each class (type, trainable, with states, needed on the device, by
/// row) ends where its parameters end. Chunk ids ascend with the first parameter of each chunk. A
/// parameter of no elements takes no bytes; its offset may be the end of its chunk.
class ChunkLayout {
 public:
  /// Lays the model out at options.chunk_bytes, or searches for a size up to 64 MiB and a sixteenth
  /// of the model (but not below 4 KiB). A size fits if the device can stream the model with the
  /// next module's chunks beside the current ones. For this the device is taken to have max(0.35 *
  /// parameter bytes, 2.2 * bytes of the largest module's parameters) beside its activations. The
  /// search takes the first of these that there is:
  ///   - the largest size that fits and wastes at most 3% of the slots;
  ///   - the size that wastes least among those that fit;
  ///   - the size with the smallest working set.
  /// A searched size is never larger than the used bytes of the fullest shared chunk. Method: Fang
  /// et al., "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management"
  /// (PatrickStar), section 6, with the device budget as a constraint.
  ///
  /// Throws InvalidArgument for:
  ///   - an empty parameter list, or parameters of more than 2^60 bytes in all;
  ///   - a world of zero or more than 2^20 processes;
  ///   - a chunk_bytes below param_alignment * world_size, or a param_alignment out of range;
  ///   - an id out of range, or modules that enclose each other;
  ///   - a trainable parameter of uint8 elements.
  ChunkLayout(std::vector<ParamSpec> params, std::vector<ModuleSpec> modules,
              const LayoutOptions& options);

  [[nodiscard]] const std::vector<ParamSpec>& params() const noexcept { return params_; }
  [[nodiscard]] const std::vector<ModuleSpec>& modules() const noexcept { return modules_; }
  [[nodiscard]] const std::vector<ChunkSpec>& chunks() const noexcept { return chunks_; }
  [[nodiscard]] const ParamSpec& param(ParamId id) const { return params_.at(index(id)); }
  [[nodiscard]] const ModuleSpec& module(ModuleId id) const { return modules_.at(index(id)); }
  [[nodiscard]] const ChunkSpec& chunk(ChunkId id) const { return chunks_.at(index(id)); }
  [[nodiscard]] ParamPlace place(ParamId id) const { return places_.at(index(id)); }
  /// Returns the chunks that a module's own parameters lie in, each once, ascending.
  [[nodiscard]] const std::vector<ChunkId>& chunks_of(ModuleId id) const {
    return module_chunks_.at(index(id));
  }
  [[nodiscard]] std::size_t chunk_bytes() const noexcept { return chunk_bytes_; }
  /// Returns the number of ranks, as the options gave it: payloads can be cut into that many equal
  /// shards.
  [[nodiscard]] std::size_t world_size() const noexcept { return world_size_; }
  /// Returns the sum of used bytes over all chunks.
  [[nodiscard]] std::size_t used_bytes() const noexcept { return used_bytes_; }
  /// Returns the slot bytes that hold no parameter as a fraction of all slot bytes. Alignment gaps
  /// count.
  [[nodiscard]] double waste() const noexcept { return waste_; }
  /// Returns the module whose chunks, with those of the modules around it, take the most device
  /// bytes; the first of equals. Returns ModuleId{0}, with a working set of 0 bytes, where there
  /// are no modules.
  [[nodiscard]] ModuleId largest_module() const noexcept { return largest_module_; }
  [[nodiscard]] std::size_t largest_working_set_bytes() const noexcept {
    return largest_working_set_bytes_;
  }

 private:
  std::vector<ParamSpec> params_;
  std::vector<ModuleSpec> modules_;
  std::vector<ChunkSpec> chunks_;
  std::vector<ParamPlace> places_;
  std::vector<std::vector<ChunkId>> module_chunks_;
  std::size_t chunk_bytes_ = 0;
  std::size_t world_size_ = 1;
  std::size_t used_bytes_ = 0;
  double waste_ = 0.0;
  ModuleId largest_module_{};
  std::size_t largest_working_set_bytes_ = 0;
};

/// Returns the bytes of the largest gradient of one trainable parameter: gradients on their way to
/// the host need that much of the device at least.
[[nodiscard]] std::size_t largest_gradient_bytes(const ChunkLayout& layout);

}  // namespace castor
