#include "io/scratch_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "core/error.h"
#include "core/units.h"
#include "io/test_support.h"

namespace castor {
namespace {

using test::read_file;
using test::write_file;

/// The errno of opening a scratch file at `path`, 0 when it worked; what() goes to `message`.
int error_of(const std::string& path, std::uint64_t bytes, std::string* message = nullptr) {
  try {
    const ScratchFile file(path, bytes);
    return 0;
  } catch (const IoError& error) {
    EXPECT_EQ(error.path(), path);
    if (message != nullptr) {
      *message = error.what();
    }
    return error.error_number();
  }
}

TEST(ScratchFileTest, TakesItsSpaceAtOnceAndGoesAtTheEnd) {
  const test::TempDirectory directory;
  {
    const ScratchFile file(directory / "scratch", kMiB + 1);
    EXPECT_EQ(file.origin(), ScratchOrigin::kNew);
    EXPECT_EQ(file.data_bytes(), kMiB + 64 * kKiB);
    struct stat status = {};
    ASSERT_EQ(::stat((directory / "scratch").c_str(), &status), 0);
    EXPECT_EQ(status.st_size, static_cast<off_t>(ScratchFile::data_begin() + file.data_bytes()));
    EXPECT_GE(status.st_blocks * 512, status.st_size);  // not a sparse file
    EXPECT_EQ(status.st_mode & 0777, 0600U);            // weights are nobody else's business
  }
  EXPECT_TRUE(directory.empty());
}

TEST(ScratchFileTest, CloseRemovesItAndMovingKeepsOneOwner) {
  const test::TempDirectory directory;
  ScratchFile file(directory / "scratch", 4096);
  {
    ScratchFile moved(std::move(file));
    EXPECT_TRUE(std::filesystem::exists(directory / "scratch"));
    moved.close();
    EXPECT_TRUE(directory.empty());
    moved.close();
  }
  EXPECT_TRUE(directory.empty());
}

TEST(ScratchFileTest, ASecondJobIsToldWhoHasIt) {
  const test::TempDirectory directory;
  const ScratchFile first(directory / "scratch", 4096);
  std::string message;
  EXPECT_EQ(error_of(directory / "scratch", 4096, &message), EBUSY);
  EXPECT_NE(message.find("process " + std::to_string(::getpid())), std::string::npos) << message;
  EXPECT_TRUE(std::filesystem::exists(directory / "scratch"));  // and it still has it
}

TEST(ScratchFileTest, WhatAKilledJobLeftIsReclaimed) {
  const test::TempDirectory directory;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const ScratchFile file(directory / "scratch", kMiB);
    (void)!::write(ready[1], "x", 1);
    ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(error_of(directory / "scratch", 4096), EBUSY);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(std::filesystem::exists(directory / "scratch"));
  {
    const ScratchFile file(directory / "scratch", 4096);
    EXPECT_EQ(file.origin(), ScratchOrigin::kReclaimed);
    EXPECT_EQ(std::filesystem::file_size(directory / "scratch"),
              ScratchFile::data_begin() + file.data_bytes());
  }
  EXPECT_TRUE(directory.empty());
  ::close(ready[0]);
  ::close(ready[1]);
}

// As a data loader's worker does, or the kernel while it closes a killed process's io_uring.
TEST(ScratchFileTest, ALockThatOutlivesItsKilledOwnerIsWaitedFor) {
  const test::TempDirectory directory;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t owner = ::fork();
  ASSERT_GE(owner, 0);
  if (owner == 0) {
    const ScratchFile file(directory / "scratch", kMiB);
    if (::fork() != 0) {
      (void)!::write(ready[1], "x", 1);
      ::pause();
    }
    ::usleep(200'000);
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ASSERT_EQ(::kill(owner, SIGKILL), 0);
  ASSERT_EQ(::waitpid(owner, nullptr, 0), owner);
  EXPECT_EQ(error_of(directory / "scratch", 4096), 0);
  EXPECT_TRUE(directory.empty());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(ScratchFileTest, AForkedChildDoesNotRemoveIt) {
  const test::TempDirectory directory;
  ScratchFile file(directory / "scratch", 4096);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    file.close();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(std::filesystem::exists(directory / "scratch"));
}

TEST(ScratchFileTest, AForeignFileIsLeftAlone) {
  const test::TempDirectory directory;
  for (const std::string& contents :
       {std::string("x"), std::string(100'000, 'y'), std::string(4096, '\0')}) {
    write_file(directory / "scratch", contents);
    std::string message;
    EXPECT_EQ(error_of(directory / "scratch", kMiB, &message), EEXIST);
    EXPECT_NE(message.find("not a scratch file of castor's"), std::string::npos) << message;
    EXPECT_EQ(read_file(directory / "scratch"), contents);
  }
}

TEST(ScratchFileTest, AnotherVersionOrADamagedHeaderIsLeftAlone) {
  const test::TempDirectory directory;
  std::string header;
  {
    const ScratchFile file(directory / "scratch", 4096);
    header = read_file(directory / "scratch").substr(0, 32);
  }
  std::string newer = header;
  newer[8] = 2;
  std::string damaged = header;
  damaged[17] = static_cast<char>(damaged[17] ^ 1);
  for (const std::string& contents : {newer, damaged}) {
    write_file(directory / "scratch", contents);
    EXPECT_EQ(error_of(directory / "scratch", 4096), EEXIST);
    EXPECT_EQ(read_file(directory / "scratch"), contents);
  }
  write_file(directory / "scratch", header);  // of a job that died before it took its space
  EXPECT_EQ(ScratchFile(directory / "scratch", 4096).origin(), ScratchOrigin::kReclaimed);
  write_file(directory / "scratch", "");  // or even before it wrote the header
  EXPECT_EQ(ScratchFile(directory / "scratch", 4096).origin(), ScratchOrigin::kNew);
}

TEST(ScratchFileTest, LinksDirectoriesAndDevicesAreLeftAlone) {
  const test::TempDirectory directory;
  write_file(directory / "target", "precious");
  std::filesystem::create_symlink(directory / "target", directory / "link");
  EXPECT_EQ(error_of(directory / "link", 4096), ELOOP);
  EXPECT_EQ(read_file(directory / "target"), "precious");
  std::filesystem::create_directory(directory / "directory");
  EXPECT_EQ(error_of(directory / "directory", 4096), EISDIR);
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  EXPECT_EQ(error_of(directory / "fifo", 4096), EEXIST);
}

TEST(ScratchFileTest, AMissingDirectoryIsNamed) {
  const test::TempDirectory directory;
  std::string message;
  EXPECT_EQ(error_of(directory / "missing/scratch", 4096, &message), ENOENT);
  EXPECT_NE(message.find("Create the directory " + directory.string() + "/missing"),
            std::string::npos)
      << message;
}

TEST(ScratchFileTest, AReadOnlyDirectoryIsRefused) {
  if (::geteuid() == 0) {
    // Root may write anywhere but to a file system that nobody may write to.
    EXPECT_NE(error_of("/proc/scratch", 4096), 0);
    return;
  }
  const test::TempDirectory directory;
  std::filesystem::permissions(
      directory.string(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  EXPECT_EQ(error_of(directory / "scratch", 4096), EACCES);
  std::filesystem::permissions(directory.string(), std::filesystem::perms::owner_all);
}

TEST(ScratchFileTest, AFullDiskIsFoundAtTheStartWithTheNumbers) {
  const test::TempDirectory directory;
  std::string message;
  const std::uint64_t bytes = std::uint64_t{1} << 50;  // a pebibyte
  EXPECT_EQ(error_of(directory / "scratch", bytes, &message), ENOSPC);
  EXPECT_NE(message.find("It needs 1024.00 TiB"), std::string::npos) << message;
  EXPECT_NE(message.find("free: free space there"), std::string::npos) << message;
  EXPECT_TRUE(directory.empty());
  EXPECT_THROW(ScratchFile(directory / "scratch", 0), InvalidArgument);
  EXPECT_TRUE(directory.empty());
}

TEST(ScratchFileTest, ATinyDiskHoldsWhatFitsAndRefusesAByteMore) {
  const test::TempDirectory directory;
  if (::mount("castor-test", directory.string().c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "no right to mount: " << std::generic_category().message(errno);
  }
  const std::uint64_t most = kMiB - ScratchFile::data_begin();
  EXPECT_EQ(error_of(directory / "scratch", most), 0);
  std::string message;
  EXPECT_EQ(error_of(directory / "scratch", most + 1, &message), ENOSPC);
  EXPECT_NE(message.find("1.00 MiB (1048576 bytes) free"), std::string::npos) << message;
  EXPECT_TRUE(directory.empty());
  EXPECT_EQ(::umount(directory.string().c_str()), 0);
}

TEST(ScratchFileTest, ALimitOnFileSizesIsAnErrorAndNoSignal) {
  const test::TempDirectory directory;
  struct rlimit old = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const struct rlimit small = {kMiB, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  const int error_number = error_of(directory / "scratch", 2 * kMiB, &message);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(error_number, EFBIG);
  EXPECT_NE(message.find("raise `ulimit -f`"), std::string::npos) << message;
  EXPECT_TRUE(directory.empty());
}

TEST(ScratchFileTest, ARemovedFileIsNotMissedAndAnotherInItsPlaceIsKept) {
  const test::TempDirectory directory;
  {
    const ScratchFile file(directory / "scratch", 4096);
    std::filesystem::remove(directory / "scratch");
    write_file(directory / "scratch", "somebody else's");
  }
  EXPECT_EQ(read_file(directory / "scratch"), "somebody else's");
}

}  // namespace
}  // namespace castor
