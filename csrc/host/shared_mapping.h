#pragma once

#include <cstddef>

namespace castor {

/// Memory of a file without a name (memfd) that several processes map. Children of this process do
/// not get it. Move-only. Empty, with data() == nullptr and errno set, where the system refuses.
class SharedMapping {
 public:
  SharedMapping() = default;
  /// Maps the first `bytes` of the file, which may be closed afterwards.
  SharedMapping(int file, std::size_t bytes);
  SharedMapping(SharedMapping&& other) noexcept;
  SharedMapping& operator=(SharedMapping&& other) noexcept;
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  ~SharedMapping();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Makes a new file of `bytes` zeros and returns its descriptor, which the caller closes. Returns
/// -1, with errno set, where the system refuses.
[[nodiscard]] int make_shared_file(std::size_t bytes) noexcept;

}  // namespace castor
