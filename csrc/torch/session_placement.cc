#include <vector>

#include "torch/session.h"

// The part of Session that moves whole chunks between device and host (docs/design/0017).
namespace castor {

// A tensor over a chunk's memory follows it, but memory that was reached without one (a numpy
// array) would not: a chunk that something else than castor refers to stays where it is. So does
// one of which something is on NVMe.
void Session::place_chunks_again() {
  if (!runtime_->placement_due() || !integrity_.whole()) {
    return;
  }
  await_updates();
  std::vector<bool> candidates(layout_.chunks().size());
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    candidates[i] = manager_->promoted(chunk) ||
                    (!optimizer_state_->stored(chunk) && !stored(chunk) && !aliased(chunk));
  }
  runtime_->place(candidates);
}

}  // namespace castor
