#include "store/session_nvme.h"

#include <utility>

#include "core/error.h"

namespace castor {

std::shared_ptr<Ledger> nvme_ledger(const SessionOptions& options, const std::string& owner) {
  return options.state.nvme ? std::make_shared<Ledger>(options.budgets->nvme(), owner) : nullptr;
}

std::unique_ptr<NvmeTier> make_nvme(const StoragePlan& places, const SessionOptions& options,
                                    MemoryTier& host, Executor& executor, Ledger* ledger,
                                    std::size_t number, Reservation& taken) {
  const std::uint64_t bytes = places.nvme_bytes();
  if (bytes == 0) {
    return nullptr;
  }
  try {
    NvmeOptions nvme = options.state.nvme.value();
    if (number > 1) {  // each model has files of its own
      nvme.file_name = "castor-" + std::to_string(number) + ".scratch";
    }
    if (!nvme.replace_engine) {
      nvme.replace_engine = [backend = options.backend](std::unique_ptr<IoEngine> engine) {
        return backend->io_engine(std::move(engine));
      };
    }
    auto tier = std::make_unique<NvmeTier>(nvme, places.nvme, host, executor);
    taken = ledger->reserve(bytes, "another model has taken it meanwhile; raise nvme_memory");
    return tier;
  } catch (const OutOfMemory& error) {
    throw error.tier() == TierKind::kNvme ? error.with(options.budgets->nvme()->shares()) : error;
  }
}

ChunkStream* stream_of(const std::unique_ptr<NvmeTier>& nvme, std::size_t content) {
  return nvme ? nvme->stream(content) : nullptr;
}

}  // namespace castor
