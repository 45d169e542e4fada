#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "core/error.h"

// Errors of user code that does with tensors what their chunks cannot follow. `param` is the name
// of a parameter; types, shapes and devices are as torch prints them.
namespace castor::tensor_errors {

// Gradients.
[[nodiscard]] UsageError sparse_gradient(const std::string& param);
[[nodiscard]] UsageError gradient_of_other_shape(const std::string& param);
[[nodiscard]] UsageError gradient_of_other_type(const std::string& param, const std::string& given,
                                                const std::string& own);
/// The gradient is part of a graph, and there are several ranks.
[[nodiscard]] UsageError gradient_in_graph(const std::string& param);
/// Passes of one step have scaled their losses by `before` and by `now`.
[[nodiscard]] UsageError loss_scale_changed(const std::string& param, double before, double now);
[[nodiscard]] UsageError other_loss_scale(const std::string& param, double scale, double others);
[[nodiscard]] UsageError edited_while_scaled(const std::string& param, double scale);
/// Ranks shard the model, and the gradient was edited in place.
[[nodiscard]] UsageError edited_where_sharded(const std::string& param);

// Parameters.
/// It was frozen when its model was boosted, and is not any more.
[[nodiscard]] UsageError requires_grad_changed(const std::string& param);
/// share_memory_() has moved the parameter.
[[nodiscard]] UsageError moved_into_shared_memory(const std::string& param);
/// `given` and `own` describe the parameter's tensor and its chunk.
[[nodiscard]] UsageError other_kind_of_memory(const std::string& param, const std::string& given,
                                              const std::string& own);
[[nodiscard]] UsageError memory_of_parameter(const std::string& param, const std::string& other);
[[nodiscard]] UsageError memory_of_other_model(const std::string& param);
[[nodiscard]] UsageError memory_that_processes_share(const std::string& param);

// Values that a parameter or its optimizer states are given.
/// `given` and `own` are (number of elements, number of dimensions).
[[nodiscard]] InvalidArgument values_of_other_shape(std::pair<std::int64_t, std::int64_t> given,
                                                    std::pair<std::int64_t, std::int64_t> own);
[[nodiscard]] InvalidArgument other_number_of_states(const std::string& param, std::size_t own,
                                                     std::size_t given);
/// `states`: name of several of them, as StateSpec::plural.
[[nodiscard]] InvalidArgument states_of_other_layout(const std::string& param,
                                                     std::string_view states);
/// A parameter of a layer of experts has another first dimension than the others, or is strided.
[[nodiscard]] InvalidArgument other_experts(const std::string& param, std::int64_t own,
                                            std::int64_t of_layer);

// Others.
/// A saved activation was written in place.
[[nodiscard]] UsageError activation_written(std::uint32_t version, std::uint32_t expected);
/// A collective, named by its operator, was given memory that is there only during its call.
[[nodiscard]] UsageError collective_outlives_memory(const std::string& operation);
/// Message to a forked child that uses the model's memory.
[[nodiscard]] const std::string& in_forked_child();

}  // namespace castor::tensor_errors
