#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/executor.h"
#include "core/ledger.h"
#include "core/memory_tier.h"
#include "io/chunk_stream.h"
#include "io/nvme_tier.h"
#include "store/session_options.h"
#include "store/storage_plan.h"

namespace castor {

// NVMe tier of a session.

/// Returns the ledger of the NVMe tier; nullptr where there is no such tier.
[[nodiscard]] std::shared_ptr<Ledger> nvme_ledger(const SessionOptions& options,
                                                  const std::string& owner);
/// Makes the NVMe tier; returns nullptr where nothing is on NVMe. `number`: the model's number
/// among those of its plugin. `taken`: receives the bytes that the tier takes from what the
/// sessions may take together. Throws OutOfMemory, and as NvmeTier.
[[nodiscard]] std::unique_ptr<NvmeTier> make_nvme(const StoragePlan& places,
                                                  const SessionOptions& options, MemoryTier& host,
                                                  Executor& executor, Ledger* ledger,
                                                  std::size_t number, Reservation& taken);
/// Returns the stream of a content (StoragePlan); nullptr where nothing of that content is on NVMe.
[[nodiscard]] ChunkStream* stream_of(const std::unique_ptr<NvmeTier>& nvme, std::size_t content);

}  // namespace castor
