#include "host/shared_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

namespace castor {

SharedMapping::SharedMapping(int file, std::size_t bytes) : bytes_(bytes) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data != MAP_FAILED) {
    data_ = static_cast<std::byte*>(data);
    ::madvise(data_, bytes_, MADV_DONTFORK);
  }
}

SharedMapping::SharedMapping(SharedMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

SharedMapping& SharedMapping::operator=(SharedMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedMapping::~SharedMapping() {
  if (data_ != nullptr) {
    ::munmap(data_, bytes_);
  }
}

int make_shared_file(std::size_t bytes) noexcept {
  const int file = ::memfd_create("castor-ranks", MFD_CLOEXEC);
  if (file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    ::close(file);
    return -1;
  }
  return file;
}

}  // namespace castor
