#include "io/fault_injection.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <limits>
#include <utility>

#include "core/error.h"
#include "io/check_requests.h"

namespace castor {
namespace {

/// Of direct transfers: what a short one is short by, at least.
constexpr std::size_t kBlockBytes = 4096;
constexpr std::byte kFlippedBit{0x10};

struct ErrnoName {
  std::string_view name;
  int number;
};
constexpr std::array kErrnoNames = {
    ErrnoName{"EIO", EIO},       ErrnoName{"ENOSPC", ENOSPC}, ErrnoName{"EDQUOT", EDQUOT},
    ErrnoName{"ENODEV", ENODEV}, ErrnoName{"ENXIO", ENXIO},   ErrnoName{"EROFS", EROFS},
    ErrnoName{"EINVAL", EINVAL}, ErrnoName{"ENOMEM", ENOMEM}, ErrnoName{"ETIMEDOUT", ETIMEDOUT},
    ErrnoName{"EINTR", EINTR},   ErrnoName{"EAGAIN", EAGAIN}};

std::string errno_names() {
  std::string names;
  for (const ErrnoName& known : kErrnoNames) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  return names;
}

[[noreturn]] void refuse(std::string_view fault, const std::string& why) {
  throw InvalidArgument("a list of I/O faults has '" + std::string(fault) + "', and " + why +
                        ". Write 'count', or OPERATION:N:FAULT such as write:17:EIO or "
                        "read:5+:short, with commas between several");
}

std::optional<IoOperation> parse_operation(std::string_view name, std::string_view fault) {
  if (name == "read") {
    return IoOperation::kRead;
  }
  if (name == "write") {
    return IoOperation::kWrite;
  }
  if (name != "any") {
    refuse(fault, "its operation is not read, write or any");
  }
  return std::nullopt;
}

IoFault parse_fault(std::string_view text) {
  const std::size_t first_colon = text.find(':');
  const std::size_t second_colon = text.find(':', first_colon + 1);
  if (first_colon == text.npos || second_colon == text.npos) {
    refuse(text, "it has not three parts");
  }
  IoFault fault{.operation = parse_operation(text.substr(0, first_colon), text)};
  std::string_view number = text.substr(first_colon + 1, second_colon - first_colon - 1);
  if (number.ends_with('+')) {
    fault.count = IoFault::kForever;
    number.remove_suffix(1);
  }
  const char* const end = number.data() + number.size();
  const auto [rest, error] = std::from_chars(number.data(), end, fault.first);
  if (error != std::errc() || rest != end || fault.first == 0) {
    refuse(text, "its N is not a number from 1 on");
  }
  --fault.first;
  const std::string_view what = text.substr(second_colon + 1);
  if (what == "short") {
    fault.kind = IoFault::Kind::kShort;
    fault.value = kBlockBytes;
    return fault;
  }
  if (what == "flip") {
    fault.kind = IoFault::Kind::kBitFlip;
    return fault;
  }
  const auto known =
      std::find_if(kErrnoNames.begin(), kErrnoNames.end(),
                   [&](const ErrnoName& candidate) { return candidate.name == what; });
  if (known == kErrnoNames.end()) {
    refuse(text, "its FAULT is not short, flip or one of " + errno_names());
  }
  fault.value = static_cast<std::uint64_t>(known->number);
  return fault;
}

std::string describe(const IoFault& fault) {
  const auto what = [&]() -> std::string {
    switch (fault.kind) {
      case IoFault::Kind::kShort: return "short by " + std::to_string(fault.value) + " bytes";
      case IoFault::Kind::kBitFlip: return "flip";
      case IoFault::Kind::kDelay: return "delay by " + std::to_string(fault.value);
      case IoFault::Kind::kErrno: break;
    }
    for (const ErrnoName& known : kErrnoNames) {
      if (static_cast<std::uint64_t>(known.number) == fault.value) {
        return std::string(known.name);
      }
    }
    return "errno " + std::to_string(fault.value);
  };
  const std::string operation =
      !fault.operation ? "any" : (*fault.operation == IoOperation::kRead ? "read" : "write");
  std::string which = std::to_string(fault.first + 1);
  if (fault.count == IoFault::kForever) {
    which += "+";
  } else if (fault.count != 1) {
    which += "-" + std::to_string(fault.first + fault.count);
  }
  return operation + ":" + which + ":" + what();
}

IoFaultCounts of_one(IoOperation operation, const IoFault* fault) {
  return {.reads = operation == IoOperation::kRead ? 1U : 0U,
          .writes = operation == IoOperation::kWrite ? 1U : 0U,
          .faults = fault != nullptr ? 1U : 0U};
}

IoFaultCounts operator+(const IoFaultCounts& a, const IoFaultCounts& b) {
  return {a.reads + b.reads, a.writes + b.writes, a.faults + b.faults};
}

}  // namespace

void IoFaultTally::add(const IoFaultCounts& counts) noexcept {
  reads_.fetch_add(counts.reads, std::memory_order_relaxed);
  writes_.fetch_add(counts.writes, std::memory_order_relaxed);
  faults_.fetch_add(counts.faults, std::memory_order_relaxed);
}

IoFaultCounts IoFaultTally::counts() const noexcept {
  return {reads_.load(std::memory_order_relaxed), writes_.load(std::memory_order_relaxed),
          faults_.load(std::memory_order_relaxed)};
}

std::vector<IoFault> parse_io_faults(std::string_view text) {
  std::vector<IoFault> faults;
  if (text == "count") {
    return faults;
  }
  for (;;) {
    const std::size_t comma = text.find(',');
    faults.push_back(parse_fault(text.substr(0, comma)));
    if (comma == text.npos) {
      return faults;
    }
    text.remove_prefix(comma + 1);
  }
}

FaultyIoEngine::FaultyIoEngine(std::unique_ptr<IoEngine> inner, std::vector<IoFault> faults,
                               Options options)
    : faults_(std::move(faults)),
      options_(options),
      shuffle_(options.shuffle_seed),
      slots_(inner->queue_depth()),
      inner_(std::move(inner)) {
  for (std::size_t place = slots_.size(); place-- > 0;) {
    free_slots_.push_back(place);
  }
}

void FaultyIoEngine::submit(std::span<const IoRequest> requests) {
  check_requests(requests, std::numeric_limits<std::size_t>::max(), in_flight(), queue_depth());
  std::vector<IoRequest> passed;
  std::vector<IoCompletion> made_up;
  const IoFaultCounts before = counts();
  IoFaultCounts added;
  for (IoRequest request : requests) {
    const std::size_t place = free_slots_[free_slots_.size() - 1 - passed.size()];
    Slot slot{request.tag, request.buffer, request.buffer.size(),
              fault_of(request.operation, before + added), nullptr};
    added = added + of_one(request.operation, slot.fault);
    if (const auto completion = spoil(request, slot)) {
      made_up.push_back(*completion);
      continue;
    }
    request.tag = place;
    slots_[place] = std::move(slot);
    passed.push_back(request);
  }
  if (!passed.empty()) {
    inner_->submit(passed);  // which may refuse: nothing is counted before
  }
  free_slots_.resize(free_slots_.size() - passed.size());
  made_up_.insert(made_up_.end(), made_up.begin(), made_up.end());
  tally_.add(added);
  if (options_.total != nullptr) {
    options_.total->add(added);
  }
}

void FaultyIoEngine::collect(std::size_t at_least, std::vector<IoCompletion>& completions) {
  const std::size_t before = completions.size();
  completions.insert(completions.end(), made_up_.begin(), made_up_.end());
  made_up_.clear();
  const std::size_t made_up = completions.size() - before;
  std::vector<IoCompletion> real;
  inner_->collect(at_least > made_up ? at_least - made_up : 0, real);
  for (const IoCompletion& completion : real) {
    take(completion, completions);
  }
  release(completions.size() - before, completions);
  if (options_.shuffle_seed != 0) {
    std::shuffle(completions.begin() + static_cast<std::ptrdiff_t>(before), completions.end(),
                 shuffle_);
  }
}

std::size_t FaultyIoEngine::in_flight() const noexcept {
  return inner_->in_flight() + made_up_.size() + held_.size();
}

std::string FaultyIoEngine::description() const {
  std::string list;
  for (const IoFault& fault : faults_) {
    list += (list.empty() ? "" : ",") + describe(fault);
  }
  const IoFaultCounts so_far = counts();
  return inner_->description() +
         (faults_.empty() ? ", operations counted (" : ", FAULTS INJECTED (") + list +
         (faults_.empty() ? "" : "; ") + "so far " + std::to_string(so_far.reads) + " reads, " +
         std::to_string(so_far.writes) + " writes, " + std::to_string(so_far.faults) + " faults)";
}

const IoFault* FaultyIoEngine::fault_of(IoOperation operation, const IoFaultCounts& before) const {
  const auto index_among = [&](const std::optional<IoOperation>& kind) {
    return !kind ? before.reads + before.writes
                 : (*kind == IoOperation::kRead ? before.reads : before.writes);
  };
  for (const IoFault& fault : faults_) {
    const std::uint64_t index = index_among(fault.operation);
    if (fault.operation.value_or(operation) == operation && index >= fault.first &&
        index - fault.first < fault.count) {
      return &fault;
    }
  }
  return nullptr;
}

/// Changes the request as its fault says; gives the completion of one that is not to be done.
std::optional<IoCompletion> FaultyIoEngine::spoil(IoRequest& request, Slot& slot) const {
  if (slot.fault == nullptr) {
    return std::nullopt;
  }
  const std::span<std::byte> whole = request.buffer;
  switch (slot.fault->kind) {
    case IoFault::Kind::kErrno:
      return IoCompletion{.tag = slot.tag,
                          .expected_bytes = whole.size(),
                          .error_number = static_cast<int>(slot.fault->value)};
    case IoFault::Kind::kShort: {
      slot.reported -= std::min<std::size_t>(slot.fault->value, slot.reported);
      if (request.operation == IoOperation::kRead) {
        slot.reported = std::max<std::size_t>(slot.reported, 1);
      }
      if (slot.reported == 0) {
        return IoCompletion{.tag = slot.tag, .expected_bytes = whole.size()};
      }
      const std::size_t done = (slot.reported + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
      request.buffer = whole.first(std::min(done, whole.size()));
      return std::nullopt;
    }
    case IoFault::Kind::kBitFlip:
      if (request.operation == IoOperation::kWrite) {  // a read's bit flips when it is there
        slot.flipped = std::make_unique<AlignedBuffer>(whole.size(), kBlockBytes);
        std::copy(whole.begin(), whole.end(), slot.flipped->data());
        slot.flipped->data()[0] ^= kFlippedBit;
        request.buffer = slot.flipped->span();
      }
      return std::nullopt;
    case IoFault::Kind::kDelay: break;
  }
  return std::nullopt;
}

void FaultyIoEngine::take(IoCompletion completion, std::vector<IoCompletion>& completions) {
  const std::size_t place = completion.tag;
  const Slot slot = std::move(slots_[place]);
  free_slots_.push_back(place);
  completion.tag = slot.tag;
  completion.expected_bytes = slot.buffer.size();
  completion.transferred_bytes = std::min(completion.transferred_bytes, slot.reported);
  if (slot.fault != nullptr && slot.fault->kind == IoFault::Kind::kBitFlip &&
      slot.flipped == nullptr && completion.transferred_bytes > 0) {
    slot.buffer[0] ^= kFlippedBit;
  }
  if (slot.fault != nullptr && slot.fault->kind == IoFault::Kind::kDelay) {
    held_.push_back({completion, slot.fault->value});
  } else {
    completions.push_back(completion);
  }
}

/// Gives what was held back long enough; all of it when nothing else is to come.
void FaultyIoEngine::release(std::size_t given, std::vector<IoCompletion>& completions) {
  const bool last = inner_->in_flight() == 0;
  std::erase_if(held_, [&](Held& held) {
    held.remaining -= std::min<std::uint64_t>(held.remaining, given);
    if (held.remaining == 0 || last) {
      completions.push_back(held.completion);
      return true;
    }
    return false;
  });
}

}  // namespace castor
