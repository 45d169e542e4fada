#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/io_engine.h"
#include "io/io_file.h"

namespace castor {

/// IoEngine over io_uring. The files are registered, and so are `buffers`, where the kernel allows
/// it: requests that lie inside one of them spare the kernel pinning their pages each time.
///
/// Not safe across fork(): a child does not see the ring. Throws InvalidArgument for a depth of 0,
/// IoError with path "io_uring" where the kernel has none or forbids it (ENOSYS, EPERM).
class UringEngine final : public IoEngine {
 public:
  UringEngine(std::vector<IoFile> files, std::size_t queue_depth,
              std::span<const std::span<std::byte>> buffers);
  ~UringEngine() override;

  void submit(std::span<const IoRequest> requests) override;
  void collect(std::size_t at_least, std::vector<IoCompletion>& completions) override;
  void wake() noexcept override;
  [[nodiscard]] std::size_t queue_depth() const noexcept override;
  [[nodiscard]] std::size_t in_flight() const noexcept override;
  [[nodiscard]] std::string description() const override;

 private:
  struct Ring;  // liburing's types stay out of the header
  std::unique_ptr<Ring> ring_;
};

}  // namespace castor
