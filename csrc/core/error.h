#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/tier_kind.h"

namespace castor {

/// Root of everything castor throws. Each subclass becomes the Python exception of the same role
/// (`castor.Error`, `castor.UsageError`, ...). Messages say what happened, to which parameter,
/// module or path, with which numbers, and what to change.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A value that can never be right (a negative size, an unknown policy). Python: ValueError.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// Calls in an order, or on a model, that castor cannot serve. Python: castor.UsageError.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A request that a tier's budget cannot hold. All figures are bytes. Python:
/// castor.OutOfMemoryError.
class OutOfMemory : public Error {
 public:
  OutOfMemory(TierKind tier, std::size_t requested, std::size_t available, std::size_t budget,
              const std::string& remedy);

  /// Returns the same error with another sentence; an empty one adds nothing.
  [[nodiscard]] OutOfMemory with(const std::string& sentence) const;

  [[nodiscard]] TierKind tier() const noexcept { return tier_; }
  [[nodiscard]] std::size_t requested() const noexcept { return requested_; }
  [[nodiscard]] std::size_t available() const noexcept { return available_; }
  [[nodiscard]] std::size_t budget() const noexcept { return budget_; }

 private:
  OutOfMemory(const std::string& message, const OutOfMemory& figures);

  TierKind tier_;
  std::size_t requested_;
  std::size_t available_;
  std::size_t budget_;
};

/// A failed or short transfer, or a file that cannot be used. Python: castor.IoError (an OSError
/// too).
class IoError : public Error {
 public:
  /// Makes the message "<what_failed> <path> at byte <offset>: <errno's text> (errno n). <remedy>".
  IoError(int error_number, std::string path, std::uint64_t offset, const std::string& what_failed,
          const std::string& remedy = "");

  [[nodiscard]] int error_number() const noexcept { return error_number_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }

 protected:
  struct WholeMessage {
    std::string text;
  };
  IoError(int error_number, std::string path, std::uint64_t offset, const WholeMessage& message);

 private:
  int error_number_;
  std::string path_;
  std::uint64_t offset_;
};

/// Data that came back from storage different from what was written (errno EBADMSG). Python:
/// castor.CorruptionError.
class CorruptionError final : public IoError {
 public:
  /// Makes the error for the data that `what` names ("exp_avg of chunk 12"). The checksums are
  /// xxh3, of `bytes` bytes from `offset` on.
  CorruptionError(const std::string& what, std::string path, std::uint64_t offset,
                  std::size_t bytes, std::uint64_t expected, std::uint64_t found);

  [[nodiscard]] std::uint64_t expected() const noexcept { return expected_; }
  [[nodiscard]] std::uint64_t found() const noexcept { return found_; }

 private:
  std::uint64_t expected_;
  std::uint64_t found_;
};

}  // namespace castor
