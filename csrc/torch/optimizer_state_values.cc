#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"
#include "optim/convert.h"
#include "optim/state_convert.h"
#include "torch/chunk_storages.h"
#include "torch/optimizer_state.h"

// The values of masters and moments: how they are given, shown and taken along.
namespace castor {
namespace {

constexpr PayloadKind kMoments[] = {PayloadKind::kExpAvg, PayloadKind::kExpAvgSq,
                                    PayloadKind::kMomentScales};

constexpr std::int64_t kPieceNumel = std::int64_t{1} << 20;

at::ScalarType moment_type(StateFormat format) {
  switch (state_bytes(format).exp_avg) {
    case 1: return at::kByte;
    case 2: return at::kBFloat16;
    default: return at::kFloat;
  }
}

/// Elements in the order of the memory that geometry_of(param) describes.
at::Tensor in_order_of(const at::Tensor& param, const at::Tensor& values) {
  if (values.sizes() != param.sizes()) {
    throw InvalidArgument("values of " + std::to_string(values.numel()) + " elements in " +
                          std::to_string(values.dim()) +
                          " dimensions do not have the shape of their parameter, which has " +
                          std::to_string(param.numel()) + " in " + std::to_string(param.dim()));
  }
  const ParamGeometry geometry = geometry_of(param);
  if (values.is_non_overlapping_and_dense() && values.strides() == geometry.strides) {
    return values.as_strided({values.numel()}, {1});
  }
  if (values.is_same(param)) {  // neither dense nor in memory of its own: row-major from now on
    return values.reshape({-1});
  }
  return at::empty_strided(geometry.sizes, geometry.strides, values.options())
      .copy_(values)
      .as_strided({values.numel()}, {1});
}

/// Calls `use(first element, piece)` for one piece of a flat tensor after another, so that what is
/// made of a piece stays small.
template <typename Use>
void for_each_piece(const at::Tensor& values, const Use& use) {
  for (std::int64_t begin = 0; begin < values.numel(); begin += kPieceNumel) {
    use(static_cast<std::size_t>(begin),
        values.narrow(0, begin, std::min(kPieceNumel, values.numel() - begin)));
  }
}

/// As at::empty_like(param, type), which for a parameter on NVMe would have it read first.
at::Tensor empty_as(const at::Tensor& param, at::ScalarType type) {
  const ParamGeometry geometry = geometry_of(param);
  return at::empty_strided(geometry.sizes, geometry.strides, at::TensorOptions().dtype(type));
}

std::size_t numel_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

}  // namespace

void OptimizerState::adopt(ParamId param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const ScalarType type = layout_.param(param).type;
  const at::Tensor& own = params_[index(param)];
  if (!has_master(param)) {
    const ParamGeometry geometry = geometry_of(own);
    with_home(param, [&](std::byte* home) {
      at::from_blob(home, geometry.sizes, geometry.strides, to_torch(type)).copy_(values);
    });
    return;
  }
  const auto adopt_at = [&](const Memory& memory, std::byte* home) {
    auto* const master = data<float>(memory, param, PayloadKind::kMaster);
    auto* const remainder = data<std::int16_t>(memory, param, PayloadKind::kRemainder);
    for_each_piece(in_order_of(own, values), [&](std::size_t begin, const at::Tensor& piece) {
      const at::Tensor exact = piece.to(at::kCPU, at::kFloat).contiguous();
      const std::size_t numel = numel_of(piece);
      if (master != nullptr) {
        std::memmove(master + begin, exact.const_data_ptr<float>(), numel * sizeof(float));
      }
      if (remainder != nullptr) {
        split_masters(&executor_, remainder + begin, exact.const_data_ptr<float>(), numel);
      }
      master_to_param(&executor_, home + begin * size_of(type), exact.const_data_ptr<float>(),
                      numel, type);
    });
  };
  with_memory(layout_.place(param).chunk, StreamAccess::kEdit, [&](const Memory& memory) {
    with_home(param, [&](std::byte* home) { adopt_at(memory, home); });
  });
}

bool OptimizerState::set_master(ParamId param, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  if (!has_master(param)) {
    return false;
  }
  with_memory(layout_.place(param).chunk, StreamAccess::kEdit, [&](const Memory& memory) {
    auto* const master = data<float>(memory, param, PayloadKind::kMaster);
    auto* const remainder = data<std::int16_t>(memory, param, PayloadKind::kRemainder);
    for_each_piece(in_order_of(params_[index(param)], values),
                   [&](std::size_t begin, const at::Tensor& piece) {
                     const at::Tensor exact = piece.to(at::kCPU, at::kFloat).contiguous();
                     if (master != nullptr) {
                       std::memmove(master + begin, exact.const_data_ptr<float>(), exact.nbytes());
                     } else {
                       split_masters(&executor_, remainder + begin, exact.const_data_ptr<float>(),
                                     numel_of(piece));
                     }
                   });
  });
  return true;
}

void OptimizerState::zero_moments() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    for (const PayloadKind kind : kMoments) {
      if (const auto& moments = manager_.payload(ChunkId{static_cast<std::uint32_t>(i)}, kind)) {
        if (on_device(ChunkId{static_cast<std::uint32_t>(i)})) {
          bytes_at(moments->data(), moments->bytes(), device_->device()).zero_();
        } else {
          std::memset(moments->data(), 0, moments->bytes());
        }
      }
    }
  }
}

void OptimizerState::before_write_back(ChunkId chunk, const std::byte* home,
                                       const std::byte* slot) {
  if (format_ == StateFormat::kFp32 || kinds_[index(chunk)].empty()) {
    return;
  }
  std::vector<std::byte> home_copy;
  std::vector<std::byte> slot_copy;
  if (device_ != nullptr) {  // at least one of them is its memory, and it may have written both
    home_copy = bytes_of_device(home, layout_.chunk(chunk).used_bytes);
    slot_copy = bytes_of_device(slot, layout_.chunk(chunk).used_bytes);
    home = home_copy.data();
    slot = slot_copy.data();
  }
  with_memory(chunk, StreamAccess::kEdit, [&](const Memory& memory) {
    auto* const remainder = memory[static_cast<std::size_t>(PayloadKind::kRemainder)];
    forget_remainders(&executor_, reinterpret_cast<std::int16_t*>(remainder),
                      reinterpret_cast<const std::uint16_t*>(home),
                      reinterpret_cast<const std::uint16_t*>(slot),
                      layout_.chunk(chunk).used_bytes / sizeof(std::uint16_t));
  });
}

void OptimizerState::before_overwrite(ParamId param, const at::Tensor& values) {
  if (!has(param, PayloadKind::kRemainder)) {
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor own = on_host(param);
  // In the order of the parameter's memory, and rounded as the copy will round.
  const at::Tensor after = empty_as(own, own.scalar_type()).copy_(values);
  with_memory(layout_.place(param).chunk, StreamAccess::kEdit, [&](const Memory& memory) {
    forget_remainders(&executor_, data<std::int16_t>(memory, param, PayloadKind::kRemainder),
                      static_cast<const std::uint16_t*>(own.const_data_ptr()),
                      static_cast<const std::uint16_t*>(after.const_data_ptr()), numel_of(own));
  });
}

at::Tensor OptimizerState::view(ParamId param, PayloadKind kind, at::ScalarType type) const {
  const ParamPlace place = layout_.place(param);
  return tensor_over(storage_over(manager_.payload(place.chunk, kind)), type, place.offset,
                     geometry_of(params_[index(param)]));
}

std::vector<at::Tensor> OptimizerState::moments(ParamId param) const {
  if (device_ != nullptr || element(param, PayloadKind::kExpAvg) == nullptr) {
    return {};
  }
  return {view(param, PayloadKind::kExpAvg, moment_type(format_)),
          view(param, PayloadKind::kExpAvgSq, moment_type(format_))};
}

ParamGeometry OptimizerState::scales_geometry(ParamId param) const {
  const auto num_blocks = static_cast<std::int64_t>(num_moment_blocks(layout_.param(param).numel));
  return {.sizes = {num_blocks, 2}, .strides = {2, 1}};
}

std::optional<at::Tensor> OptimizerState::moment_scales(ParamId param) const {
  const ParamPlace place = layout_.place(param);
  const auto& payload = manager_.payload(place.chunk, PayloadKind::kMomentScales);
  if (device_ != nullptr || !payload) {
    return std::nullopt;
  }
  return tensor_over(storage_over(payload), at::kFloat, 2 * (place.offset / kMomentBlock),
                     scales_geometry(param));
}

std::optional<at::Tensor> OptimizerState::master_view(ParamId param) const {
  if (device_ != nullptr || element(param, PayloadKind::kMaster) == nullptr) {
    return std::nullopt;
  }
  return view(param, PayloadKind::kMaster, at::kFloat);
}

std::optional<at::Tensor> OptimizerState::master(ParamId param) const {
  if (!has_master(param)) {
    return std::nullopt;
  }
  if (auto shown = master_view(param)) {
    return shown;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor own = on_host(param);
  at::Tensor values = empty_as(own, at::kFloat);
  with_memory(layout_.place(param).chunk, StreamAccess::kRead, [&](const Memory& memory) {
    if (const auto* master = data<float>(memory, param, PayloadKind::kMaster)) {
      std::memcpy(values.mutable_data_ptr(), master, values.nbytes());
    } else {
      join_masters(&executor_, values.mutable_data_ptr<float>(),
                   static_cast<const std::uint16_t*>(own.const_data_ptr()),
                   data<std::int16_t>(memory, param, PayloadKind::kRemainder), numel_of(own));
    }
  });
  return values;
}

std::vector<at::Tensor> OptimizerState::empty_moments(ParamId param) const {
  const at::Tensor& own = params_[index(param)];
  std::vector<at::Tensor> moments = {empty_as(own, moment_type(format_)),
                                     empty_as(own, moment_type(format_))};
  if (has(param, PayloadKind::kMomentScales)) {
    moments.push_back(at::empty(scales_geometry(param).sizes, at::kFloat));
  }
  return moments;
}

std::vector<at::Tensor> OptimizerState::read_moments(ParamId param) const {
  std::vector<at::Tensor> moments = empty_moments(param);
  with_memory(layout_.place(param).chunk, StreamAccess::kRead, [&](const Memory& memory) {
    for (std::size_t i = 0; i < moments.size(); ++i) {
      std::memcpy(moments[i].mutable_data_ptr(), element(memory, param, kMoments[i]),
                  moments[i].nbytes());
    }
  });
  return moments;
}

void OptimizerState::write_moments(ParamId param, std::span<const at::Tensor> moments) {
  const std::vector<at::Tensor> expected = empty_moments(param);
  if (moments.size() != expected.size()) {
    throw InvalidArgument("parameter '" + layout_.param(param).name + "' has " +
                          std::to_string(expected.size()) + " tensors of moments, and " +
                          std::to_string(moments.size()) + " were given");
  }
  for (std::size_t i = 0; i < moments.size(); ++i) {
    if (moments[i].sizes() != expected[i].sizes() ||
        moments[i].strides() != expected[i].strides() ||
        moments[i].scalar_type() != expected[i].scalar_type()) {
      throw InvalidArgument(std::string(to_string(kMoments[i])) + " of parameter '" +
                            layout_.param(param).name +
                            "' differ in shape, strides or type from what read_moments gives");
    }
  }
  with_memory(layout_.place(param).chunk, StreamAccess::kEdit, [&](const Memory& memory) {
    for (std::size_t i = 0; i < moments.size(); ++i) {
      std::memcpy(element(memory, param, kMoments[i]), moments[i].const_data_ptr(),
                  moments[i].nbytes());
    }
  });
}

}  // namespace castor
