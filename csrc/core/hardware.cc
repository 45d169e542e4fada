#include "core/hardware.h"

#include <cmath>
#include <string>

#include "core/error.h"

namespace castor {
namespace {

void check_speed(const char* name, double value) {
  if (!std::isfinite(value) || value <= 0.0) {
    throw InvalidArgument(std::string(name) + " is " + std::to_string(value) +
                          "; it must be above 0");
  }
}

void check_cost(const char* name, double value) {
  if (!std::isfinite(value) || value < 0.0) {
    throw InvalidArgument(std::string(name) + " is " + std::to_string(value) +
                          "; it must be at least 0");
  }
}

}  // namespace

void check_hardware(const Hardware& hardware) {
  check_speed("h2d_bytes_per_second", hardware.h2d_bytes_per_second);
  check_speed("d2h_bytes_per_second", hardware.d2h_bytes_per_second);
  check_speed("dram_bytes_per_second", hardware.dram_bytes_per_second);
  check_speed("device_memory_bytes_per_second", hardware.device_memory_bytes_per_second);
  if (hardware.nvme_bytes_per_second != 0.0) {
    check_speed("nvme_bytes_per_second", hardware.nvme_bytes_per_second);
  }
  if (hardware.update_bytes_per_second != 0.0) {
    check_speed("update_bytes_per_second", hardware.update_bytes_per_second);
  }
  if (hardware.gathering_ranks == 0) {
    throw InvalidArgument("gathering_ranks is 0; without ranks that reduce on devices it is 1");
  }
}

void check_optimizer_cost(const OptimizerCost& optimizer) {
  check_cost("state_bytes_per_element", optimizer.state_bytes_per_element);
  check_cost("moved_bytes_per_element", optimizer.moved_bytes_per_element);
  check_cost("written_bytes_per_element", optimizer.written_bytes_per_element);
  check_cost("norm_bytes_per_element", optimizer.norm_bytes_per_element);
  check_cost("device_update_fraction", optimizer.device_update_fraction);
  if (optimizer.device_update_fraction > 1.0) {
    throw InvalidArgument("device_update_fraction is " +
                          std::to_string(optimizer.device_update_fraction) +
                          "; it must lie in [0, 1]");
  }
  if (optimizer.written_bytes_per_element > optimizer.moved_bytes_per_element) {
    throw InvalidArgument("an update moves " + std::to_string(optimizer.moved_bytes_per_element) +
                          " bytes an element, and cannot write " +
                          std::to_string(optimizer.written_bytes_per_element));
  }
  if (optimizer.overlap == Overlap::kBackward) {
    throw InvalidArgument("the simulator has no updates beside backward; give kNone or kForward");
  }
}

std::uint64_t payload_bytes(const ChunkSpec& chunk, const OptimizerCost& optimizer) {
  return (chunk.trainable ? 2 : 1) * chunk.used_bytes + state_bytes_of(chunk, optimizer);
}

std::uint64_t state_bytes_of(const ChunkSpec& chunk, const OptimizerCost& optimizer) {
  if (!chunk.has_state) {
    return 0;
  }
  const double state = static_cast<double>(num_elements(chunk)) * optimizer.state_bytes_per_element;
  return static_cast<std::uint64_t>(std::ceil(state));
}

}  // namespace castor
