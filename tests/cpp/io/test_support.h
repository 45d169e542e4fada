#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "core/executor.h"
#include "io/aligned_buffer.h"
#include "io/direct_file.h"
#include "io/io_engines.h"

namespace castor::test {

/// A directory that goes with the test. `parent`: where; the build directory, on a disk, by
/// default.
class TempDirectory {
 public:
  explicit TempDirectory(const std::filesystem::path& parent = std::filesystem::current_path()) {
    std::string name = (parent / "castor-io-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::system_error(errno, std::generic_category(), name);
    }
    path_ = name;
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  [[nodiscard]] std::string operator/(const std::string& name) const {
    return (path_ / name).string();
  }
  [[nodiscard]] std::string string() const { return path_.string(); }
  [[nodiscard]] bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary) << contents;
}

inline std::string read_file(const std::string& path) {
  std::string contents(std::filesystem::file_size(path), '\0');
  std::ifstream(path, std::ios::binary)
      .read(contents.data(), static_cast<std::streamsize>(contents.size()));
  return contents;
}

inline DirectFile make_file(const std::string& path, std::uint64_t bytes) {
  write_file(path, "");
  std::filesystem::resize_file(path, bytes);
  return {path, FileAccess::kReadWrite};
}

/// Bytes that differ at every position and for every seed.
inline void fill(std::span<std::byte> memory, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  for (std::byte& value : memory) {
    value = static_cast<std::byte>(generator());
  }
}

inline AlignedBuffer noise(std::size_t bytes, std::uint64_t seed) {
  AlignedBuffer buffer(bytes, kIoAlignment);
  fill(buffer.span(), seed);
  return buffer;
}

inline bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

class SerialExecutor final : public Executor {
 public:
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) override {
    for (std::size_t i = 0; i < count; ++i) {
      body(i);
    }
  }
  [[nodiscard]] std::size_t num_threads() const noexcept override { return 1; }
};

/// A kind of engine on a kind of file system: what the suites run over.
struct Place {
  std::string name;
  IoEngineKind engine;
  std::filesystem::path parent;
};

inline void PrintTo(const Place& place, std::ostream* stream) { *stream << place.name; }

inline std::vector<Place> every_place() {
  const std::filesystem::path disk = std::filesystem::current_path();
  return {{"IoUringDisk", IoEngineKind::kIoUring, disk},
          {"IoUringTmpfs", IoEngineKind::kIoUring, "/dev/shm"},
          {"ThreadsDisk", IoEngineKind::kThreads, disk},
          {"ThreadsTmpfs", IoEngineKind::kThreads, "/dev/shm"}};
}

/// Skips, visibly, what this machine has not got; CASTOR_REQUIRE_IO_URING=1 makes that a failure.
class PlaceTest : public ::testing::TestWithParam<Place> {
 protected:
  void SetUp() override {
    if (GetParam().engine == IoEngineKind::kIoUring) {
      const std::string reason = why_no_io_uring();
      const char* const required = std::getenv("CASTOR_REQUIRE_IO_URING");
      if (!reason.empty() && required != nullptr && std::string(required) == "1") {
        FAIL() << reason;
      }
      if (!reason.empty()) {
        GTEST_SKIP() << reason;
      }
    }
    if (!std::filesystem::is_directory(GetParam().parent)) {
      GTEST_SKIP() << GetParam().parent << " does not exist";
    }
    directory_ = std::make_unique<TempDirectory>(GetParam().parent);
  }

  [[nodiscard]] std::unique_ptr<IoEngine> make_engine(
      const DirectFile& file, std::size_t depth,
      std::span<const std::span<std::byte>> buffers = {}) const {
    return make_io_engine(GetParam().engine, {{file.descriptor(), file.path()}}, depth, buffers);
  }

  std::unique_ptr<TempDirectory> directory_;
};

}  // namespace castor::test
