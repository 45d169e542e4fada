#include "torch/param_memory.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "store/charged_account.h"
#include "store/tensor_errors.h"
#include "torch/storage_writes.h"
#include "torch/uses.h"

namespace castor {
namespace {

/// A tensor of the same values, over the same memory, that autograd does not know.
at::Tensor alias_of(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(/*version=*/0), /*allow_tensor_metadata_change=*/true));
}

std::string described(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes() << " of type " << toString(tensor.scalar_type()) << " on "
       << tensor.device();
  return text.str();
}

}  // namespace

ParamMemory::ParamMemory(const ChunkLayout& layout, std::span<const ParamHandle> params,
                         ChunkStorages& storages, OptimizerState& state, Visit visit)
    : layout_(layout),
      params_(params),
      storages_(storages),
      state_(state),
      visit_(std::move(visit)) {
  for (const ParamHandle& param : params) {
    geometries_.push_back(geometry_of(param.local));
  }
}

bool ParamMemory::fills_storage(const at::Tensor& tensor, at::ScalarType type) {
  const c10::Storage& storage = tensor.storage();
  return tensor.scalar_type() == type && storage.resizable() && storage.device().is_cpu() &&
         !is_shared_by_processes(storage) && storage.nbytes() == tensor.nbytes() &&
         tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense();
}

void ParamMemory::watch(TensorGate& gate, std::span<const std::size_t> others) {
  gate_ = &gate;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    positions_.push_back(gate.watch(index(layout_.place(param).chunk), params_[i].local));
    uses_.push_back(uses_of(storages_.storage(param)) - others[i]);
    if (others[i] > 0) {
      storages_.distrust(param, uses_.back());
    }
  }
  num_given_ = num_given_memory();
}

// A storage that castor lends memory owns none: share_memory_() gives it some.
bool ParamMemory::in_place(ParamId param) const noexcept {
  const c10::Storage& storage = storages_.storage(param);
  return lies_over(params_[index(param)].local, storage, type(param), geometries_[index(param)]) &&
         !has_other_memory(storage);
}

void ParamMemory::take_up_all() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    take_up(ParamId{static_cast<std::uint32_t>(i)});
  }
}

void ParamMemory::take_up_given() {
  const std::uint64_t num_given = num_given_memory();
  if (num_given != num_given_) {
    take_up_all();
    num_given_ = num_given;
  }
}

bool ParamMemory::rebound(ChunkId chunk) const {
  const auto& params = layout_.chunk(chunk).params;
  return std::any_of(params.begin(), params.end(),
                     [this](ParamId param) { return !in_place(param); });
}

bool ParamMemory::aliased(ParamId param) const {
  const c10::Storage& storage = storages_.storage(param);
  const std::size_t own = lies_over(params_[index(param)].local, storage) ? 0 : 1;
  return uses_of(storage) + own > uses_[index(param)];
}

void ParamMemory::check(ParamId param) const {
  const at::Tensor& own = params_[index(param)].local;
  const c10::Storage& storage = storages_.storage(param);
  if (has_other_memory(storage)) {
    throw tensor_errors::moved_into_shared_memory(layout_.param(param).name);
  }
  if (own.layout() != at::kStrided || own.scalar_type() != type(param) ||
      own.device() != storage.device() || own.sizes() != geometries_[index(param)].sizes) {
    std::ostringstream held;
    held << c10::IntArrayRef(geometries_[index(param)].sizes) << " of type "
         << toString(type(param)) << " on " << storage.device();
    throw tensor_errors::other_kind_of_memory(layout_.param(param).name, described(own),
                                              held.str());
  }
  if (!lies_over(own, storage)) {
    check_memory(param, own.storage());
  }
}

void ParamMemory::check_memory(ParamId param, const c10::Storage& given) const {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId other{static_cast<std::uint32_t>(i)};
    if (storages_.storage(other).unsafeGetStorageImpl() == given.unsafeGetStorageImpl()) {
      if (in_place(other)) {
        throw tensor_errors::memory_of_parameter(layout_.param(param).name,
                                                 layout_.param(other).name);
      }
      return;  // that one has been given other memory too: they were swapped
    }
  }
  if (is_watched(given)) {
    throw tensor_errors::memory_of_other_model(layout_.param(param).name);
  }
  if (is_shared_by_processes(given)) {
    throw tensor_errors::memory_that_processes_share(layout_.param(param).name);
  }
}

void ParamMemory::take_up_values(ParamId param) {
  check(param);
  const at::NoGradGuard no_grad;
  const at::Tensor& own = params_[index(param)].local;
  gate_->pass(index(layout_.place(param).chunk));
  at::Tensor values = alias_of(own);
  const bool of_chunk = lies_over(own, storages_.storage(param));
  if (of_chunk) {  // in another order
    gate_->follow(index(layout_.place(param).chunk), values);
    values = values.clone();
  } else if (aliased(param)) {
    leave_to_holders(param);
  }
  lay_in_chunk(param);
  try {
    write(param, values);
  } catch (...) {
    own.unsafeGetTensorImpl()->set_storage_keep_dtype(values.storage());
    own.unsafeGetTensorImpl()->set_sizes_and_strides(values.sizes(), values.strides(),
                                                     values.storage_offset());
    throw;
  }
  if (!of_chunk && adoptable(param, values)) {
    storages_.adopt(param, values.storage());
    lay_in_chunk(param);
    values.reset();
    storages_.distrust(param, uses_[index(param)]);
  }
}

void ParamMemory::leave_to_holders(ParamId param) {
  const std::size_t group = index(layout_.place(param).chunk);
  const at::Tensor now =
      tensor_over(storages_.storage(param), type(param), /*offset=*/0, geometries_[index(param)]);
  gate_->follow(group, now);
  const Uncharged uncharged;
  at::Tensor copy = now.clone(at::MemoryFormat::Preserve);
  const c10::Storage before = storages_.renew(param);
  lay_in_chunk(param);
  give_memory(before, std::move(copy));
}

void ParamMemory::lay_in_chunk(ParamId param) {
  const at::Tensor& own = params_[index(param)].local;
  lay_over(own, storages_.storage(param), geometries_[index(param)]);
  gate_->replace(index(layout_.place(param).chunk), positions_[index(param)], own);
}

// Graphs that saved the parameter are as valid as they were: no write is counted, as none is where
// torch gives a tensor other memory.
void ParamMemory::write(ParamId param, const at::Tensor& values) {
  const at::Tensor& own = params_[index(param)].local;
  {
    const auto visited = visit_(param);
    state_.before_overwrite(param, values);
  }
  c10::VariableVersion counter = own.unsafeGetTensorImpl()->version_counter();
  const std::uint32_t version = counter.current_version();
  own.copy_(values);
  counter.set_version(version);
  storages_.note_write(param);
}

// Whether others are over the memory that the parameter was given, and can follow it: they are
// known neither to the gate nor to who brings weights from NVMe.
bool ParamMemory::adoptable(ParamId param, const at::Tensor& values) const {
  constexpr std::size_t kOwnUses = 1;  // of the storage: that of `values`
  return uses_of(values.storage()) > kOwnUses && !is_gated(params_[index(param)].local) &&
         fills_storage(values, type(param)) &&
         values.strides() == geometries_[index(param)].strides;
}

}  // namespace castor
