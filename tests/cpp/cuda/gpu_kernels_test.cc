#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/adam_kernel.h"
#include "cuda/adam_state.h"
#include "cuda/element_state.h"
#include "cuda/gpu_test.h"
#include "cuda/mean_cases.h"
#include "cuda/mean_kernel.h"
#include "cuda/norm_kernel.h"
#include "cuda/update_kernels.h"
#include "optim/gradient.h"

namespace castor {
namespace {

using testing::AdamKind;
using testing::AdamState;
using testing::DeviceBuffer;
using testing::ElementHeld;
using testing::ElementKind;
using testing::GpuTest;
using testing::options_with;
using testing::ScopedStream;
using testing::update_on_cpu;

/// One step on the device, there and back.
void update_on_gpu(AdamState& state, const AdamCoefficients& coefficients, std::int64_t step) {
  DeviceBuffer device(state.bytes().size());
  device.write(state.bytes());
  const AdamSegment segment = state.segment(device.data(), coefficients, step);
  ScopedStream stream;
  cuda::adam_update({&segment, 1}, stream.get());
  stream.synchronize();
  device.read(state.bytes());
}

class GpuAdamTest : public GpuTest, public ::testing::WithParamInterface<AdamKind> {};

TEST_P(GpuAdamTest, GivesTheCpusBitsAtEveryLengthAndAlignment) {
  for (const WeightDecayMode mode : {WeightDecayMode::kDecoupled, WeightDecayMode::kL2}) {
    for (const std::size_t numel :
         {0u, 1u, 31u, 255u, 256u, 257u, 1023u, 1024u, 1025u, 4099u, 1'000'007u}) {
      for (const std::size_t skew : {0u, 1u}) {
        AdamState state(numel, GetParam().type, GetParam().format, skew, 7);
        AdamState expected = state;
        for (std::int64_t step = 1; step <= 3; ++step) {
          const AdamCoefficients coefficients(options_with(mode), step, 0.37);
          update_on_gpu(state, coefficients, step);
          update_on_cpu(expected, coefficients, step);
          ASSERT_EQ(state.difference(expected), "") << numel << " elements, step " << step;
        }
      }
    }
  }
}

TEST_P(GpuAdamTest, GivesTheCpusBitsForSpecialValues) {
  for (const WeightDecayMode mode : {WeightDecayMode::kDecoupled, WeightDecayMode::kL2}) {
    for (const double eps : {0.0, 1e-8}) {
      AdamOptions options = options_with(mode);
      options.eps = eps;
      AdamState state = testing::special_state(GetParam());
      AdamState expected = state;
      for (std::int64_t step = 1; step <= 2; ++step) {
        const AdamCoefficients coefficients(options, step, 1.0);
        update_on_gpu(state, coefficients, step);
        update_on_cpu(expected, coefficients, step);
        ASSERT_EQ(state.difference(expected), "") << "step " << step << ", eps " << eps;
      }
    }
  }
}

TEST_P(GpuAdamTest, AParameterMayChangeSidesBetweenSteps) {
  AdamState state(10'007, GetParam().type, GetParam().format, 0, 3);
  AdamState expected = state;
  for (std::int64_t step = 1; step <= 8; ++step) {
    const AdamCoefficients coefficients(options_with(WeightDecayMode::kDecoupled), step, 1.0);
    state.set_grads(static_cast<unsigned>(step));
    expected.set_grads(static_cast<unsigned>(step));
    if (step % 2 == 0) {
      update_on_gpu(state, coefficients, step);
    } else {
      update_on_cpu(state, coefficients, step);
    }
    update_on_cpu(expected, coefficients, step);
  }
  EXPECT_EQ(state.difference(expected), "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, GpuAdamTest, ::testing::ValuesIn(testing::kAdamKinds),
                         testing::kind_name);

/// One step on the device, there and back.
void update_on_gpu(ElementHeld& held, std::int64_t step) {
  DeviceBuffer device(held.bytes().size());
  device.write(held.bytes());
  const UpdateSegment segment = held.segment(device.data(), step);
  ScopedStream stream;
  cuda::update(held.rule(), {&segment, 1}, stream.get());
  stream.synchronize();
  device.read(held.bytes());
}

class GpuElementTest : public GpuTest, public ::testing::WithParamInterface<ElementKind> {};

TEST_P(GpuElementTest, GivesTheCpusBitsAtEveryLengthAndAlignment) {
  for (const std::size_t numel : {0u, 1u, 31u, 256u, 1023u, 1024u, 1025u, 4099u, 100'003u}) {
    for (const std::size_t skew : {0u, 1u}) {
      ElementHeld held(GetParam(), numel, skew, 7);
      ElementHeld expected = held;
      for (std::int64_t step = 1; step <= 3; ++step) {
        update_on_gpu(held, step);
        expected.update_on_cpu(step);
        ASSERT_EQ(held.difference(expected), "") << numel << " elements, step " << step;
      }
    }
  }
}

TEST_P(GpuElementTest, GivesTheCpusBitsForSpecialValues) {
  ElementHeld held = testing::special_elements(GetParam());
  ElementHeld expected = held;
  for (std::int64_t step = 1; step <= 2; ++step) {
    update_on_gpu(held, step);
    expected.update_on_cpu(step);
    ASSERT_EQ(held.difference(expected), "") << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GpuElementTest, ::testing::ValuesIn(testing::element_kinds()),
                         testing::element_kind_name);

class GpuKernelTest : public GpuTest {};

TEST_F(GpuKernelTest, UpdatesManySegmentsOfEveryKindAtOnce) {
  std::vector<AdamState> states;
  for (std::size_t i = 0; i < 100; ++i) {
    const AdamKind& kind = testing::kAdamKinds[i % std::size(testing::kAdamKinds)];
    states.emplace_back(i * 37, kind.type, kind.format, i % 2, static_cast<unsigned>(i));
  }
  const AdamCoefficients coefficients(options_with(WeightDecayMode::kDecoupled), 1, 1.0);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<AdamSegment> segments;
  for (AdamState& state : states) {
    buffers.push_back(std::make_unique<DeviceBuffer>(state.bytes().size()));
    buffers.back()->write(state.bytes());
    segments.push_back(state.segment(buffers.back()->data(), coefficients, 1));
  }
  ScopedStream stream;
  cuda::adam_update(segments, stream.get());
  stream.synchronize();
  for (std::size_t i = 0; i < states.size(); ++i) {
    AdamState expected = states[i];
    update_on_cpu(expected, coefficients, 1);
    buffers[i]->read(states[i].bytes());
    EXPECT_EQ(states[i].difference(expected), "") << "segment " << i;
  }
}

TEST_F(GpuKernelTest, RefusesAnIncompleteSegmentBeforeAnythingRuns) {
  const AdamSegment segment{.numel = 3, .coefficients = AdamCoefficients({}, 1, 1.0)};
  EXPECT_THROW(cuda::adam_update({&segment, 1}, nullptr), InvalidArgument);
  const cuda::NormSegment no_data{.numel = 3};
  EXPECT_THROW(cuda::square_norms({&no_data, 1}, nullptr, nullptr, nullptr), InvalidArgument);
}

TEST_F(GpuKernelTest, MeansHaveTheCpusBits) {
  ScopedStream stream;
  testing::for_each_mean([&](const testing::MeanCase& one) {
    DeviceBuffer parts(one.parts.size());
    parts.write(one.parts);
    cuda::average(parts.data(), parts.data(), one.count, one.numel, one.type, stream.get());
    stream.synchronize();
    std::vector<std::byte> mean(one.numel * size_of(one.type));
    parts.read(mean);
    testing::expect_mean(one, mean);
  });
}

TEST_F(GpuKernelTest, SquareNormsHaveTheCpusBits) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<std::vector<std::byte>> host;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<cuda::NormSegment> segments;
  for (const ScalarType type :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
    for (const std::size_t numel : {0u, 1u, 17u, 4095u, 4096u, 4097u, 3'000'017u}) {
      std::vector<std::byte>& bytes = host.emplace_back(numel * size_of(type));
      for (std::size_t i = 0; i < numel; ++i) {
        const float value = i % 97 == 5 ? 0x1p-140f : normal(random);
        const std::uint16_t rounded = testing::reference_round(
            value, type == ScalarType::kFloat32 ? ScalarType::kBFloat16 : type);
        if (type == ScalarType::kFloat32) {
          std::memcpy(bytes.data() + 4 * i, &value, 4);
        } else {
          std::memcpy(bytes.data() + 2 * i, &rounded, 2);
        }
      }
      buffers.push_back(std::make_unique<DeviceBuffer>(bytes.size()));
      buffers.back()->write(bytes);
      segments.push_back({.data = buffers.back()->data(), .numel = numel, .type = type});
    }
  }
  DeviceBuffer sums(segments.size() * sizeof(double));
  DeviceBuffer workspace(cuda::norm_workspace_doubles(segments) * sizeof(double));
  ScopedStream stream;
  cuda::square_norms(segments, reinterpret_cast<double*>(sums.data()),
                     reinterpret_cast<double*>(workspace.data()), stream.get());
  stream.synchronize();
  std::vector<double> found(segments.size());
  sums.read(std::as_writable_bytes(std::span(found)));
  for (std::size_t i = 0; i < segments.size(); ++i) {
    EXPECT_EQ(found[i], copy_and_square_norm(nullptr, nullptr, host[i].data(), segments[i].numel,
                                             segments[i].type))
        << i;
  }
}

}  // namespace
}  // namespace castor
