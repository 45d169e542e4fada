// What `castor io-bench` measures with, runs of a file.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "io/checksum.h"
#include "io/file_runs.h"
#include "io/io_engines.h"
#include "io/io_measure.h"
#include "io/scratch_file.h"
#include "parallel/idle_thread.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace castor {
namespace {

std::span<const std::byte> bytes_of(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  return {static_cast<const std::byte*>(info.ptr),
          static_cast<std::size_t>(info.size * info.itemsize)};
}

/// where_idle(), but for work on few bytes: an idle thread may take longer to get a core.
void where_worth_it(std::size_t bytes, const std::function<void()>& work) {
  if (bytes < 256 * kKiB) {
    work();
  } else {
    where_idle(work);
  }
}

/// A scratch file in a directory, filled once, to measure on. It has a name of its own, so that it
/// never meets a training job's.
class IoBench {
 public:
  IoBench(const std::string& directory, std::uint64_t num_bytes, const std::string& engine)
      : kind_(parse_io_engine_kind(engine)),
        scratch_((std::filesystem::path(directory) / "castor.io-bench").string(), num_bytes) {
    fill_range(kind_, scratch_.file(), ScratchFile::data_begin(), scratch_.data_bytes());
  }

  [[nodiscard]] std::string file() const { return scratch_.file().description(); }

  [[nodiscard]] bool direct() const { return scratch_.file().direct(); }

  [[nodiscard]] std::tuple<std::uint64_t, std::uint64_t, double, std::string> measure(
      const std::string& mix, std::size_t block_bytes, std::size_t depth, double seconds) const {
    if (closed_) {
      throw UsageError("this measurement's file was removed by close()");
    }
    const IoMeasurement found = measure_io(kind_, scratch_.file(),
                                           {.mix = parse_io_mix(mix),
                                            .block_bytes = block_bytes,
                                            .depth = depth,
                                            .begin = ScratchFile::data_begin(),
                                            .bytes = scratch_.data_bytes(),
                                            .seconds = seconds});
    return {found.read_bytes, found.written_bytes, found.seconds, found.engine};
  }

  void close() {
    closed_ = true;
    scratch_.close();
  }

 private:
  IoEngineKind kind_;
  ScratchFile scratch_;
  bool closed_ = false;
};

}  // namespace

void bind_io(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<IoBench>(module, "IoBench")
      .def(py::init<const std::string&, std::uint64_t, const std::string&>(), py::arg("directory"),
           py::arg("num_bytes"), py::arg("engine"), released)
      .def_property_readonly("file", &IoBench::file)
      .def_property_readonly("direct", &IoBench::direct)
      .def("measure", &IoBench::measure, py::arg("mix"), py::arg("block_bytes"), py::arg("depth"),
           py::arg("seconds"), released)
      .def("close", &IoBench::close, released);
  module.def(
      "write_runs",
      [](int descriptor, const py::buffer& data, std::uint64_t begin, std::uint64_t first,
         std::uint64_t length, std::uint64_t stride) {
        const std::span<const std::byte> bytes = bytes_of(data);
        const py::gil_scoped_release others_go_on;
        write_runs({.descriptor = descriptor, .path = "a checkpoint's file"}, bytes, begin,
                   {.first = first, .length = length, .stride = stride});
      },
      py::arg("descriptor"), py::arg("data"), py::kw_only(), py::arg("begin"), py::arg("first"),
      py::arg("length"), py::arg("stride"));
  py::class_<StreamChecksum>(module, "Checksum")
      .def(py::init<>())
      .def(
          "update",
          [](StreamChecksum& self, const py::buffer& data) {
            const std::span<const std::byte> bytes = bytes_of(data);
            const py::gil_scoped_release others_go_on;
            where_worth_it(bytes.size(), [&] { self.update(bytes); });
          },
          py::arg("data"))
      .def("hexdigest", &StreamChecksum::hex);
  // As target[:] = source, and update() of the checksums, without Python's lock.
  module.def(
      "copy_bytes",
      [](const py::buffer& target, const py::buffer& source,
         const std::vector<StreamChecksum*>& checksums) {
        const py::buffer_info to = target.request(/*writable=*/true);
        const std::span<const std::byte> from = bytes_of(source);
        if (static_cast<std::size_t>(to.size * to.itemsize) != from.size()) {
          throw InvalidArgument(std::to_string(from.size()) + " bytes are no copy of " +
                                std::to_string(to.size * to.itemsize));
        }
        const py::gil_scoped_release others_go_on;
        where_worth_it(from.size(), [&] {
          std::memcpy(to.ptr, from.data(), from.size());
          for (StreamChecksum* const checksum : checksums) {
            checksum->update(from);
          }
        });
      },
      py::arg("target"), py::arg("source"), py::arg("checksums"));
  module.def("why_no_io_uring", &why_no_io_uring);
}

}  // namespace castor
