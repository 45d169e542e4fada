#include "io/file_runs.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <string>

#include "core/error.h"
#include "io/test_support.h"
#include "io/unique_fd.h"

namespace castor {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

class FileRunsTest : public testing::Test {
 protected:
  FileRunsTest() {
    test::write_file(path_, std::string(20, '.'));
    descriptor_ = UniqueFd(::open(path_.c_str(), O_WRONLY | O_CLOEXEC));
  }

  [[nodiscard]] IoFile file() const { return {.descriptor = descriptor_.get(), .path = path_}; }
  [[nodiscard]] std::string contents() const { return test::read_file(path_); }

 private:
  test::TempDirectory directory_;
  std::string path_ = directory_ / "file";
  UniqueFd descriptor_;
};

TEST_F(FileRunsTest, RunsLieEvenlyApart) {
  write_runs(file(), bytes_of("abcdefghi"), 0, {.first = 1, .length = 3, .stride = 5});
  EXPECT_EQ(contents(), ".abc..def..ghi......");
}

TEST_F(FileRunsTest, APartBeginsAndEndsWithinRuns) {
  write_runs(file(), bytes_of("EFGHI"), 4, {.first = 1, .length = 3, .stride = 5});
  EXPECT_EQ(contents(), ".......EF..GHI......");
  write_runs(file(), bytes_of("b"), 1, {.first = 1, .length = 3, .stride = 5});
  EXPECT_EQ(contents(), "..b....EF..GHI......");
}

TEST_F(FileRunsTest, NothingIsWrittenOfNoBytes) {
  write_runs(file(), {}, 7, {.first = 1, .length = 3, .stride = 5});
  EXPECT_EQ(contents(), std::string(20, '.'));
}

TEST_F(FileRunsTest, RunsThatFollowEachOtherAreOne) {
  write_runs(file(), bytes_of("abcdef"), 0, {.first = 2, .length = 2, .stride = 2});
  EXPECT_EQ(contents(), "..abcdef............");
}

TEST_F(FileRunsTest, EmptyOrOverlappingRunsAreRefused) {
  EXPECT_THROW(write_runs(file(), bytes_of("a"), 0, {.first = 0, .length = 0, .stride = 5}),
               InvalidArgument);
  EXPECT_THROW(write_runs(file(), bytes_of("a"), 0, {.first = 0, .length = 3, .stride = 2}),
               InvalidArgument);
}

TEST_F(FileRunsTest, WhatTheFileSystemRefusesIsThrown) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 8, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  try {
    write_runs(file(), bytes_of("abcdefghi"), 0, {.first = 1, .length = 3, .stride = 5});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), EFBIG);
    EXPECT_EQ(error.offset(), 8U);  // the second run has written two of its bytes
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(contents(), ".abc..de............");
}

}  // namespace
}  // namespace castor
