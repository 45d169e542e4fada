#include "core/chunk_layout.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

constexpr std::size_t kMinSearchedBytes = 4 * kKiB;
constexpr std::size_t kMaxSearchedBytes = 64 * kMiB;  // known to planner/layout_bounds.py
// No searched chunk holds more than this share of the model, so that a small one streams smoothly
// too.
constexpr std::size_t kMinSharesOfModel = 16;
constexpr std::size_t kCandidatesPerOctave = 32;
constexpr double kMaxWaste = 0.03;
constexpr double kReserveOfModel = 0.35;
constexpr double kReserveOfLargestModule = 2.2;

// Far above any machine, far enough below SIZE_MAX that no sum of this file can wrap.
constexpr std::size_t kMaxModelBytes = std::size_t{1} << 60;
constexpr std::size_t kMaxWorldSize = std::size_t{1} << 20;
constexpr std::size_t kMaxParamAlignment = kMiB;
constexpr std::size_t kMaxIds = std::numeric_limits<std::uint32_t>::max();

constexpr std::size_t kNumScalarTypes = 4;
static_assert(to_string(static_cast<ScalarType>(kNumScalarTypes)) == "unknown");
constexpr std::size_t kNumClasses = 12 * kNumScalarTypes;

// Parameters share a chunk only within a class.
std::size_t class_of(const ParamSpec& param, bool needed) {
  const std::size_t role = !param.trainable ? 0 : param.has_state ? 1 : 2;
  const std::size_t reader = (param.by_row ? 2 : 0) + (needed ? 1 : 0);
  return 12 * static_cast<std::size_t>(param.type) + 4 * role + reader;
}

// By some module, on the device. Without modules there is nobody to tell: all are.
std::vector<bool> needed_params(std::size_t num_params, std::span<const ModuleSpec> modules) {
  std::vector<bool> needed(num_params, modules.empty());
  for (const ModuleSpec& module : modules) {
    for (const ParamId id : module.params) {
      needed[index(id)] = true;
    }
  }
  return needed;
}

std::size_t bytes_of(const ParamSpec& param) { return param.numel * size_of(param.type); }

constexpr std::size_t align_down(std::size_t value, std::size_t alignment) {
  return value / alignment * alignment;
}

void check_options(const LayoutOptions& options) {
  if (options.world_size == 0 || options.world_size > kMaxWorldSize) {
    throw InvalidArgument("world_size is " + std::to_string(options.world_size) +
                          "; it must lie between 1 and " + std::to_string(kMaxWorldSize));
  }
  if (options.param_alignment == 0 || options.param_alignment % kParamAlignment != 0 ||
      options.param_alignment > kMaxParamAlignment) {
    throw InvalidArgument("param_alignment is " + std::to_string(options.param_alignment) +
                          " bytes; it must be a multiple of " + std::to_string(kParamAlignment) +
                          " up to " + format_bytes(kMaxParamAlignment));
  }
  const std::size_t least = options.param_alignment * options.world_size;
  if (options.chunk_bytes != 0 && options.chunk_bytes < least) {
    throw InvalidArgument("chunk_bytes is " + format_bytes(options.chunk_bytes) +
                          "; with world_size " + std::to_string(options.world_size) +
                          " it must be at least " + format_bytes(least) +
                          ", or 0 to search for the size");
  }
}

void check_params(std::span<const ParamSpec> params, std::size_t alignment) {
  if (params.empty()) {
    throw InvalidArgument("there are no parameters to lay out; pass a model that has some");
  }
  if (params.size() > kMaxIds) {
    throw InvalidArgument("there are " + std::to_string(params.size()) + " parameters; at most " +
                          std::to_string(kMaxIds) + " are supported");
  }
  std::size_t left = kMaxModelBytes;
  for (const ParamSpec& param : params) {
    if (param.type == ScalarType::kUInt8 && param.trainable) {
      throw InvalidArgument("parameter '" + param.name +
                            "' of uint8 elements is trainable; packed parameters are frozen");
    }
    // The first test keeps bytes_of and align_up from wrapping.
    if (param.numel > left || align_up(bytes_of(param), alignment) > left) {
      throw InvalidArgument("parameter '" + param.name + "' of " + std::to_string(param.numel) +
                            " elements takes the model beyond " + format_bytes(kMaxModelBytes) +
                            "; check its shape");
    }
    left -= align_up(bytes_of(param), alignment);
  }
}

void check_modules(std::span<const ModuleSpec> modules, std::size_t num_params) {
  if (modules.size() > kMaxIds) {
    throw InvalidArgument("there are " + std::to_string(modules.size()) + " modules; at most " +
                          std::to_string(kMaxIds) + " are supported");
  }
  for (const ModuleSpec& module : modules) {
    for (const ParamId id : module.params) {
      if (index(id) >= num_params) {
        throw InvalidArgument("module '" + module.name + "' lists parameter " +
                              std::to_string(index(id)) + ", but the model has " +
                              std::to_string(num_params));
      }
    }
    if (module.parent.has_value() && index(*module.parent) >= modules.size()) {
      throw InvalidArgument("module '" + module.name + "' has parent " +
                            std::to_string(index(*module.parent)) + ", but the model has " +
                            std::to_string(modules.size()) + " modules");
    }
  }
}

// One end of a module's stay on the stack of modules that run.
struct Visit {
  enum class Kind : std::uint8_t { kEnter, kLeave };
  ModuleId module{};
  Kind kind = Kind::kEnter;
};

// The enters and leaves of a depth-first walk over the modules: between the two of a module, all
// its ancestors have been entered and not left.
std::vector<Visit> walk(std::span<const ModuleSpec> modules) {
  std::vector<std::vector<ModuleId>> children(modules.size());
  std::vector<Visit> pending;
  for (std::size_t i = modules.size(); i-- > 0;) {
    const auto id = static_cast<ModuleId>(i);
    if (modules[i].parent.has_value()) {
      children[index(*modules[i].parent)].push_back(id);
    } else {
      pending.push_back({id, Visit::Kind::kEnter});
    }
  }
  std::vector<Visit> visits;
  visits.reserve(2 * modules.size());
  while (!pending.empty()) {
    const Visit visit = pending.back();
    pending.pop_back();
    visits.push_back(visit);
    if (visit.kind == Visit::Kind::kEnter) {
      pending.push_back({visit.module, Visit::Kind::kLeave});
      for (const ModuleId child : children[index(visit.module)]) {
        pending.push_back({child, Visit::Kind::kEnter});
      }
    }
  }
  if (visits.size() == 2 * modules.size()) {
    return visits;
  }
  // A module no walk from a root reaches is its own ancestor, or lies below one that is.
  std::vector<bool> reached(modules.size(), false);
  for (const Visit& visit : visits) {
    reached[index(visit.module)] = true;
  }
  const auto lost =
      static_cast<std::size_t>(std::find(reached.begin(), reached.end(), false) - reached.begin());
  throw InvalidArgument("the parents of module '" + modules[lost].name +
                        "' form a cycle; parent must name an enclosing module");
}

// What one chunk size comes to.
struct Fit {
  double waste = 0.0;
  ModuleId largest_module{};
  std::size_t largest_working_set_bytes = 0;
};

// Lays parameters out at one capacity after another, in the same buffers: linear in parameters and
// modules, without allocation once the buffers have grown. Borrows both lists.
class Packer {
 public:
  struct Chunk {
    std::size_t capacity_bytes;
    std::size_t used_bytes;
  };

  Packer(std::span<const ParamSpec> params, const std::vector<bool>& needed,
         std::span<const ModuleSpec> modules, const LayoutOptions& options)
      : modules_(modules),
        visits_(walk(modules)),
        unit_(options.param_alignment * options.world_size) {
    params_.reserve(params.size());
    for (std::size_t i = 0; i < params.size(); ++i) {
      const std::size_t bytes = bytes_of(params[i]);
      params_.push_back(
          {align_up(bytes, options.param_alignment), class_of(params[i], needed[i]), 0, 0});
      param_bytes_ += bytes;
      needed_bytes_ += needed[i] ? bytes : 0;
      aligned_bytes_ += params_.back().bytes;
    }
    for (const ModuleSpec& module : modules) {
      std::vector<ParamId> own = module.params;
      std::sort(own.begin(), own.end());
      own.erase(std::unique(own.begin(), own.end()), own.end());
      std::size_t bytes = 0;
      for (const ParamId id : own) {
        bytes += bytes_of(params[index(id)]);
      }
      largest_module_bytes_ = std::max(largest_module_bytes_, bytes);
    }
  }

  // `capacity_bytes` is a multiple of unit().
  Fit pack(std::size_t capacity_bytes) {
    place(capacity_bytes);
    Fit fit;
    std::size_t slot_bytes = 0;
    for (const Chunk& chunk : chunks_) {
      slot_bytes += chunk.capacity_bytes;
    }
    fit.waste = static_cast<double>(slot_bytes - param_bytes_) / static_cast<double>(slot_bytes);
    measure_working_sets(fit);
    return fit;
  }

  // The smallest capacity at which pack() groups the parameters as it does at `capacity_bytes`:
  // what the fullest shared chunk uses. A parameter that fits or overflows at one does so at the
  // other.
  [[nodiscard]] std::size_t tighten(std::size_t capacity_bytes) {
    place(capacity_bytes);
    std::size_t fullest = 0;
    for (const Chunk& chunk : chunks_) {
      if (chunk.used_bytes <= capacity_bytes) {
        fullest = std::max(fullest, chunk.used_bytes);
      }
    }
    return fullest == 0 ? capacity_bytes : fullest;
  }

  [[nodiscard]] std::size_t unit() const { return unit_; }
  // Of the parameters that some module needs on the device.
  [[nodiscard]] std::size_t needed_bytes() const { return needed_bytes_; }
  [[nodiscard]] std::size_t aligned_bytes() const { return aligned_bytes_; }
  [[nodiscard]] std::size_t largest_module_bytes() const { return largest_module_bytes_; }

  // Of the last pack().
  [[nodiscard]] std::span<const Chunk> chunks() const { return chunks_; }
  [[nodiscard]] std::size_t chunk_of(std::size_t param) const { return params_[param].chunk; }
  [[nodiscard]] std::size_t offset_bytes(std::size_t param) const { return params_[param].offset; }

 private:
  struct Param {
    std::size_t bytes;
    std::size_t param_class;
    std::size_t chunk;
    std::size_t offset;
  };
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

  void place(std::size_t capacity_bytes) {
    std::array<std::size_t, kNumClasses> open{};
    open.fill(kNone);
    chunks_.clear();
    for (Param& param : params_) {
      std::size_t chunk = open[param.param_class];
      if (param.bytes > capacity_bytes) {
        chunk = chunks_.size();
        chunks_.push_back({align_up(param.bytes, unit_), 0});
      } else if (chunk == kNone || param.bytes > capacity_bytes - chunks_[chunk].used_bytes) {
        chunk = open[param.param_class] = chunks_.size();
        chunks_.push_back({capacity_bytes, 0});
      }
      param.chunk = chunk;
      param.offset = chunks_[chunk].used_bytes;
      chunks_[chunk].used_bytes += param.bytes;
    }
    for (Chunk& chunk : chunks_) {
      chunk.used_bytes = std::max(align_up(chunk.used_bytes, unit_), unit_);
    }
    for (const std::size_t last : open) {
      if (last != kNone) {
        chunks_[last].capacity_bytes = chunks_[last].used_bytes;
      }
    }
  }

  void measure_working_sets(Fit& fit) {
    num_users_.assign(chunks_.size(), 0);
    std::size_t resident_bytes = 0;
    for (const Visit& visit : visits_) {
      const std::vector<ParamId>& own = modules_[index(visit.module)].params;
      if (visit.kind == Visit::Kind::kLeave) {
        for (const ParamId id : own) {
          const std::size_t chunk = params_[index(id)].chunk;
          resident_bytes -= --num_users_[chunk] == 0 ? chunks_[chunk].capacity_bytes : 0;
        }
        continue;
      }
      for (const ParamId id : own) {
        const std::size_t chunk = params_[index(id)].chunk;
        resident_bytes += num_users_[chunk]++ == 0 ? chunks_[chunk].capacity_bytes : 0;
      }
      if (resident_bytes > fit.largest_working_set_bytes ||
          (resident_bytes == fit.largest_working_set_bytes && visit.module < fit.largest_module)) {
        fit.largest_working_set_bytes = resident_bytes;
        fit.largest_module = visit.module;
      }
    }
  }

  std::span<const ModuleSpec> modules_;
  std::vector<Visit> visits_;
  std::size_t unit_;
  std::vector<Param> params_;
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> num_users_;
  std::size_t param_bytes_ = 0;
  std::size_t needed_bytes_ = 0;
  std::size_t aligned_bytes_ = 0;
  std::size_t largest_module_bytes_ = 0;
};

// Descending, distinct, never empty. Integer steps of 1/32 of each power of two, so that every
// process of a job computes the same sizes.
std::vector<std::size_t> candidate_sizes(std::size_t model_bytes, std::size_t unit) {
  const std::size_t share =
      std::clamp(model_bytes / kMinSharesOfModel, kMinSearchedBytes, kMaxSearchedBytes);
  std::vector<std::size_t> sizes = {std::max(align_down(share, unit), unit)};
  for (std::size_t octave = kMaxSearchedBytes / 2; octave >= kMinSearchedBytes; octave /= 2) {
    for (std::size_t step = kCandidatesPerOctave; step-- > 0;) {
      const std::size_t size = align_down(octave + octave / kCandidatesPerOctave * step, unit);
      if (size > 0 && size < sizes.back()) {
        sizes.push_back(size);
      }
    }
  }
  return sizes;
}

std::size_t search_chunk_bytes(Packer& packer) {
  struct Choice {
    std::size_t chunk_bytes = 0;
    double cost = std::numeric_limits<double>::infinity();

    // The first of equals stays, which is the largest size.
    void offer(std::size_t bytes, double new_cost) {
      if (new_cost < cost) {
        *this = {bytes, new_cost};
      }
    }
  };
  const double reserve =
      std::max(kReserveOfModel * static_cast<double>(packer.needed_bytes()),
               kReserveOfLargestModule * static_cast<double>(packer.largest_module_bytes()));
  Choice largest;
  Choice least_waste;
  Choice least_working_set;
  for (const std::size_t candidate : candidate_sizes(packer.aligned_bytes(), packer.unit())) {
    const std::size_t bytes = packer.tighten(candidate);
    const Fit fit = packer.pack(bytes);
    const auto working_set = static_cast<double>(fit.largest_working_set_bytes);
    if (working_set <= reserve / 2 && fit.waste <= kMaxWaste) {
      return bytes;
    }
    if (working_set <= reserve) {
      if (fit.waste <= kMaxWaste) {
        largest.offer(bytes, 0.0);
      }
      least_waste.offer(bytes, fit.waste);
    }
    least_working_set.offer(bytes, working_set);
  }
  for (const Choice& choice : {largest, least_waste}) {
    if (choice.chunk_bytes != 0) {
      return choice.chunk_bytes;
    }
  }
  return least_working_set.chunk_bytes;
}

}  // namespace

ChunkLayout::ChunkLayout(std::vector<ParamSpec> params, std::vector<ModuleSpec> modules,
                         const LayoutOptions& options)
    : params_(std::move(params)), modules_(std::move(modules)), world_size_(options.world_size) {
  check_options(options);
  check_params(params_, options.param_alignment);
  check_modules(modules_, params_.size());

  const std::vector<bool> needed = needed_params(params_.size(), modules_);
  Packer packer(params_, needed, modules_, options);
  chunk_bytes_ = options.chunk_bytes == 0 ? search_chunk_bytes(packer)
                                          : align_down(options.chunk_bytes, packer.unit());
  const Fit fit = packer.pack(chunk_bytes_);
  waste_ = fit.waste;
  largest_module_ = fit.largest_module;
  largest_working_set_bytes_ = fit.largest_working_set_bytes;

  chunks_.reserve(packer.chunks().size());
  for (const Packer::Chunk& chunk : packer.chunks()) {
    ChunkSpec& spec = chunks_.emplace_back();
    spec.capacity_bytes = chunk.capacity_bytes;
    spec.used_bytes = chunk.used_bytes;
    used_bytes_ += chunk.used_bytes;
  }
  places_.reserve(params_.size());
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const std::size_t chunk = packer.chunk_of(i);
    chunks_[chunk].type = params_[i].type;
    chunks_[chunk].trainable = params_[i].trainable;
    chunks_[chunk].has_state = params_[i].trainable && params_[i].has_state;
    chunks_[chunk].read_on_host = !needed[i];
    chunks_[chunk].by_row = params_[i].by_row;
    chunks_[chunk].params.push_back(static_cast<ParamId>(i));
    places_.push_back(
        {static_cast<ChunkId>(chunk), packer.offset_bytes(i) / size_of(params_[i].type)});
  }
  module_chunks_.reserve(modules_.size());
  for (const ModuleSpec& module : modules_) {
    std::vector<ChunkId>& own = module_chunks_.emplace_back();
    for (const ParamId id : module.params) {
      own.push_back(places_[index(id)].chunk);
    }
    std::sort(own.begin(), own.end());
    own.erase(std::unique(own.begin(), own.end()), own.end());
  }
}

std::size_t largest_gradient_bytes(const ChunkLayout& layout) {
  std::size_t largest = 0;
  for (const ParamSpec& param : layout.params()) {
    if (param.trainable) {
      largest = std::max(largest, param.numel * size_of(param.type));
    }
  }
  return largest;
}

}  // namespace castor
