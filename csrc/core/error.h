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

/// A tier's budget cannot hold a request. All figures are bytes. Python: castor.OutOfMemoryError.
class OutOfMemory : public Error {
 public:
  OutOfMemory(TierKind tier, std::size_t requested, std::size_t available, std::size_t budget,
              const std::string& remedy);

  [[nodiscard]] TierKind tier() const noexcept { return tier_; }
  [[nodiscard]] std::size_t requested() const noexcept { return requested_; }
  [[nodiscard]] std::size_t available() const noexcept { return available_; }
  [[nodiscard]] std::size_t budget() const noexcept { return budget_; }

 private:
  TierKind tier_;
  std::size_t requested_;
  std::size_t available_;
  std::size_t budget_;
};

/// A failed or short transfer. Python: castor.IoError (an OSError too).
class IoError : public Error {
 public:
  IoError(int error_number, std::string path, std::uint64_t offset, const std::string& what_failed);

  [[nodiscard]] int error_number() const noexcept { return error_number_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }

 private:
  int error_number_;
  std::string path_;
  std::uint64_t offset_;
};

}  // namespace castor
