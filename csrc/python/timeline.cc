// What castor.report is made from: the chunks of a session and the timeline of its last step.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "core/payload.h"
#include "core/timeline.h"
#include "python/bindings.h"
#include "python/names.h"
#include "torch/session.h"

namespace py = pybind11;

namespace castor {

std::optional<py::dict> timeline(Session& session) {
  const Timeline step = without_gil([&] {
    if (session.runtime().device_times_pending()) {
      session.memory().device().fence()->wait();  // the device comes to the end of the last step
    }
    return session.runtime().timeline();
  });
  if (step.bytes.empty()) {
    return std::nullopt;
  }
  py::list events;
  for (std::size_t i = 0; i < step.bytes.size(); ++i) {
    const Event& event = step.trace.events()[i];
    const EventBytes& bytes = step.bytes[i];
    events.append(py::make_tuple(static_cast<std::uint8_t>(event.kind), event.id, event.time_ns,
                                 bytes.slot_bytes, event.nonmodel_bytes, bytes.device_peak_bytes,
                                 bytes.host_bytes));
  }
  py::list transfers;
  for (const Transfer& transfer : step.transfers) {
    transfers.append(py::make_tuple(name_of(transfer.kind), name_of(transfer.cause), transfer.event,
                                    index(transfer.chunk), transfer.start_ns, transfer.submit_ns,
                                    transfer.wait_ns, transfer.bytes));
  }
  py::list device_times;
  for (const DeviceTime& time : step.device_times.events) {
    device_times.append(py::make_tuple(time.reached_ns, time.compute_ns));
  }
  const auto indices = [](const std::vector<ChunkId>& chunks) {
    py::list result;
    for (const ChunkId chunk : chunks) {
      result.append(index(chunk));
    }
    return result;
  };
  py::dict result;
  result["events"] = events;
  result["transfers"] = transfers;
  result["resident_at_start"] = indices(step.resident_at_start);
  result["on_device_at_start"] = indices(step.on_device_at_start);
  result["update_begin_ns"] = step.update_begin_ns;
  result["end_ns"] = step.end_ns;
  result["device_times"] = device_times;
  result["device_end_ns"] = step.device_times.end_ns;
  result["peak_device_bytes"] = step.peak_device_bytes;
  result["guidance"] = name_of(step.guidance);
  result["complete"] = step.complete;
  return result;
}

py::list chunks(Session& session) {
  const StateStore& places = session.optimizer_state().places();
  const auto key_of = [&places](PayloadKind kind) {
    return py::str(std::string(places.name_of(kind)));
  };
  py::list result;
  for (std::size_t i = 0; i < session.layout().chunks().size(); ++i) {
    const ChunkId id{static_cast<std::uint32_t>(i)};
    const ChunkSpec& spec = session.layout().chunk(id);
    py::list params;
    for (const ParamId param : spec.params) {
      params.append(index(param));
    }
    py::dict payloads;
    for (std::size_t kind = 0; kind < kNumPayloadKinds; ++kind) {
      if (const auto& payload =
              session.chunks().manager().payload(id, static_cast<PayloadKind>(kind))) {
        payloads[key_of(static_cast<PayloadKind>(kind))] =
            py::make_tuple(std::string(to_string(payload->tier())), payload->bytes());
      }
    }
    if (places.sharded(id)) {
      payloads[key_of(PayloadKind::kParam)] =
          py::make_tuple(std::string(to_string(TierKind::kHost)),
                         session.memory().sharded_host_storage().shards()->shard(id).size());
    }
    for (const auto& [kind, bytes] : places.stored_payloads(id)) {
      payloads[key_of(kind)] = py::make_tuple(std::string(to_string(TierKind::kNvme)), bytes);
    }
    py::dict chunk;
    chunk["params"] = params;
    chunk["capacity_bytes"] = spec.capacity_bytes;
    chunk["used_bytes"] = spec.used_bytes;
    chunk["dtype"] = std::string(to_string(spec.type));
    chunk["trainable"] = spec.trainable;
    chunk["on_device_bytes"] = session.chunks().manager().on_device_bytes(id);
    chunk["payloads"] = payloads;
    result.append(chunk);
  }
  return result;
}

}  // namespace castor
