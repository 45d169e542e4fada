#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/executor.h"
#include "core/ledger.h"
#include "core/memory_tier.h"
#include "io/chunk_stream.h"
#include "io/nvme_tier.h"
#include "torch/host_places.h"
#include "torch/session_options.h"

namespace castor {

// What a session has on NVMe.

/// nullptr: there is no such tier.
[[nodiscard]] std::shared_ptr<Ledger> nvme_ledger(const SessionOptions& options,
                                                  const std::string& owner);
/// nullptr where nothing is there. `number`: of the model in this process; `taken`: of what the
/// sessions may take there together. Throws OutOfMemory, and what NvmeTier does.
[[nodiscard]] std::unique_ptr<NvmeTier> make_nvme(const HostPlaces& places,
                                                  const SessionOptions& options, MemoryTier& host,
                                                  Executor& executor, Ledger* ledger,
                                                  std::size_t number, Reservation& taken);
/// nullptr: nothing of that content is on NVMe.
[[nodiscard]] ChunkStream* stream_of(const std::unique_ptr<NvmeTier>& nvme, std::size_t content);

}  // namespace castor
