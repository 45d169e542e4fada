#include "io/io_engines.h"

#include <cerrno>
#include <utility>

#include "core/error.h"
#include "io/thread_io_engine.h"
#ifdef CASTOR_HAVE_LIBURING
#include "io/uring_engine.h"
#endif

namespace castor {
namespace {

/// The thread engine where io_uring was preferred; says why.
class FallbackEngine final : public IoEngine {
 public:
  FallbackEngine(std::vector<IoFile> files, std::size_t queue_depth, std::string reason)
      : engine_(std::move(files), queue_depth), reason_(std::move(reason)) {}

  void submit(std::span<const IoRequest> requests) override { engine_.submit(requests); }
  void collect(std::size_t at_least, std::vector<IoCompletion>& completions) override {
    engine_.collect(at_least, completions);
  }
  void wake() noexcept override { engine_.wake(); }
  [[nodiscard]] std::size_t queue_depth() const noexcept override { return engine_.queue_depth(); }
  [[nodiscard]] std::size_t in_flight() const noexcept override { return engine_.in_flight(); }
  [[nodiscard]] std::string description() const override {
    return engine_.description() + " (not io_uring: " + reason_ + ")";
  }

 private:
  ThreadIoEngine engine_;
  std::string reason_;
};

std::unique_ptr<IoEngine> make_uring(std::vector<IoFile> files, std::size_t queue_depth,
                                     std::span<const std::span<std::byte>> buffers) {
#ifdef CASTOR_HAVE_LIBURING
  return std::make_unique<UringEngine>(std::move(files), queue_depth, buffers);
#else
  (void)files;
  (void)queue_depth;
  (void)buffers;
  throw IoError(ENOSYS, "io_uring", 0, "this castor was built without liburing and has no",
                "Build it where liburing-dev is installed, or use the thread engine");
#endif
}

}  // namespace

IoEngineKind parse_io_engine_kind(std::string_view name) {
  if (name == "auto") {
    return IoEngineKind::kAuto;
  }
  if (name == "io_uring") {
    return IoEngineKind::kIoUring;
  }
  if (name == "threads") {
    return IoEngineKind::kThreads;
  }
  throw InvalidArgument("unknown I/O engine '" + std::string(name) +
                        "': use 'auto', 'io_uring' or 'threads'");
}

std::string why_no_io_uring() {
  try {
    (void)make_uring({}, 1, {});
    return "";
  } catch (const IoError& error) {
    return error.what();
  }
}

std::unique_ptr<IoEngine> make_io_engine(IoEngineKind kind, std::vector<IoFile> files,
                                         std::size_t queue_depth,
                                         std::span<const std::span<std::byte>> buffers) {
  if (kind == IoEngineKind::kThreads) {
    return std::make_unique<ThreadIoEngine>(std::move(files), queue_depth);
  }
  if (kind == IoEngineKind::kIoUring) {
    return make_uring(std::move(files), queue_depth, buffers);
  }
  try {
    return make_uring(files, queue_depth, buffers);
  } catch (const IoError& error) {
    return std::make_unique<FallbackEngine>(std::move(files), queue_depth, error.what());
  }
}

}  // namespace castor
