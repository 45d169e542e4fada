#include "cuda/element_body.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/element_state.h"
#include "cuda/host_kernels.h"

namespace castor {
namespace {

using testing::ElementHeld;
using testing::ElementKind;

void update_by_kernels(ElementHeld& held, std::int64_t step) {
  const UpdateSegment segment = held.segment(held.bytes().data(), step);
  testing::kernels_on_host(held.rule().name())->update(held.rule(), {&segment, 1});
}

class ElementBodyTest : public ::testing::TestWithParam<ElementKind> {};

TEST_P(ElementBodyTest, GivesTheCpuLoopsBitsAtEveryLength) {
  for (const std::size_t numel : {0u, 1u, 255u, 256u, 1023u, 1024u, 1025u, 4099u}) {
    ElementHeld held(GetParam(), numel, numel % 2, 7);
    ElementHeld expected = held;
    for (std::int64_t step = 1; step <= 3; ++step) {
      held.set_grads(static_cast<unsigned>(step));
      expected.set_grads(static_cast<unsigned>(step));
      update_by_kernels(held, step);
      expected.update_on_cpu(step);
      ASSERT_EQ(held.difference(expected), "") << numel << " elements, step " << step;
    }
  }
}

TEST_P(ElementBodyTest, GivesTheCpuLoopsBitsForSpecialValues) {
  ElementHeld held = testing::special_elements(GetParam());
  ElementHeld expected = held;
  for (std::int64_t step = 1; step <= 2; ++step) {
    update_by_kernels(held, step);
    expected.update_on_cpu(step);
    ASSERT_EQ(held.difference(expected), "") << "step " << step;
  }
}

TEST_P(ElementBodyTest, TakesAParameterThatUserCodeWrote) {
  ElementHeld held(GetParam(), 1000, 0, 3);
  for (std::size_t i = 0; i < held.numel(); i += 3) {
    if (GetParam().type == ScalarType::kFloat32) {
      held.set_weight(i, 1.0f + static_cast<float>(i));  // which is its own master
    } else {
      held.set_param_bits(i, static_cast<std::uint16_t>(0x3c00u + i));
    }
  }
  ElementHeld expected = held;
  update_by_kernels(held, 1);
  expected.update_on_cpu(1);
  EXPECT_EQ(held.difference(expected), "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, ElementBodyTest, ::testing::ValuesIn(testing::element_kinds()),
                         testing::element_kind_name);

// A GPU's arithmetic gives the NaN 0x7fffffff; here it stands in a state, and the CPU passes its
// bits on.
TEST(ElementBodyTest, TheNanOfAGpuDoesNotBecomeAZero) {
  const ElementKind kind{
      "", "sgd_momentum", {0.1, 0.9}, ScalarType::kBFloat16, StateFormat::kSplit};
  ElementHeld held(kind, 4, 0, 1);
  for (std::size_t i = 0; i < held.numel(); ++i)
    held.set_state(i, std::bit_cast<float>(0x7fffffffu));
  update_by_kernels(held, 2);
  for (std::size_t i = 0; i < held.numel(); ++i) {
    EXPECT_EQ(held.param_bits(i), 0x7fc0u);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(held.state(i)), 0x7fc00000u);
  }
}

TEST(ElementBodyTest, SegmentsOfEveryTypeGoInOneCall) {
  const auto kind = [](ScalarType type) {
    return ElementKind{"", "lion", {1e-3, 0.9, 0.99, 0.1}, type, StateFormat::kFp32};
  };
  std::vector<ElementHeld> held;
  for (unsigned i = 0; i < 200; ++i) {
    const ScalarType types[] = {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16};
    held.emplace_back(kind(types[i % 3]), i * 37, i % 2, i);
  }
  std::vector<ElementHeld> expected = held;
  std::vector<UpdateSegment> segments;
  for (ElementHeld& one : held)
    segments.push_back(one.segment(one.bytes().data(), 1));
  testing::kernels_on_host("lion")->update(held[0].rule(), segments);
  for (std::size_t i = 0; i < held.size(); ++i) {
    expected[i].update_on_cpu(1);
    EXPECT_EQ(held[i].difference(expected[i]), "") << "segment " << i;
  }
}

TEST(ElementBodyTest, ASegmentWithoutArithmeticIsRefusedBeforeAnythingIsWritten) {
  const ElementKind kind{"", "sgd", {0.1}, ScalarType::kFloat32, StateFormat::kFp32};
  ElementHeld held(kind, 100, 0, 1);
  const ElementHeld before = held;
  std::vector<UpdateSegment> segments(2, held.segment(held.bytes().data(), 1));
  const auto update = testing::kernels_on_host("sgd")->update;
  segments[1].type = ScalarType::kUInt8;
  segments[1].master = reinterpret_cast<float*>(held.bytes().data());
  EXPECT_THROW(update(held.rule(), segments), InvalidArgument);
  segments[1] = segments[0];
  segments[1].grad = nullptr;
  EXPECT_THROW(update(held.rule(), segments), InvalidArgument);
  EXPECT_EQ(held.difference(before), "");
}

}  // namespace
}  // namespace castor
