#include "store/tensor_errors.h"

namespace castor::tensor_errors {
namespace {

std::string parameter(const std::string& name) { return "parameter '" + name + "'"; }

std::string gradient_of(const std::string& name) { return "the gradient of " + parameter(name); }

}  // namespace

UsageError sparse_gradient(const std::string& param) {
  return UsageError(parameter(param) +
                    " received a sparse gradient, which castor does not support; build the "
                    "embedding with sparse=False");
}

UsageError gradient_of_other_shape(const std::string& param) {
  return UsageError("the gradient assigned to " + parameter(param) +
                    " has another shape than the parameter");
}

UsageError gradient_of_other_type(const std::string& param, const std::string& given,
                                  const std::string& own) {
  return UsageError(parameter(param) + " was given a gradient of type " + given +
                    ", and its gradients are " + own +
                    ", to which castor does not round it: assign grad.to(param.dtype)");
}

UsageError gradient_in_graph(const std::string& param) {
  return UsageError(gradient_of(param) +
                    " is a part of a graph (backward(create_graph=True)), which several ranks "
                    "cannot bring together; train with one process");
}

UsageError loss_scale_changed(const std::string& param, double before, double now) {
  return UsageError(gradient_of(param) + " was accumulated with loss scale " +
                    std::to_string(before) + " and now with " + std::to_string(now) +
                    "; use booster.backward for every micro-batch of a step, and zero_grad "
                    "between steps");
}

UsageError other_loss_scale(const std::string& param, double scale, double others) {
  return UsageError(gradient_of(param) + " carries loss scale " + std::to_string(scale) +
                    ", others carry " + std::to_string(others) +
                    "; use booster.backward for every micro-batch of a step");
}

UsageError edited_while_scaled(const std::string& param, double scale) {
  return UsageError("the gradient of parameter '" + param +
                    "' was edited while it carries the loss scale " + std::to_string(scale) +
                    "; clip with GeminiPlugin(max_norm=...), which knows the scale");
}

UsageError edited_where_sharded(const std::string& param) {
  return UsageError("the gradient of parameter '" + param +
                    "' was edited in place, and ranks shard this model: "
                    "clip_grad_norm_ takes the norm of this rank's part for the model's; clip "
                    "with the plugin's max_norm, which counts all parts, and edit gradients in "
                    "hooks (param.register_hook) or assign them");
}

UsageError requires_grad_changed(const std::string& param) {
  return UsageError(parameter(param) +
                    " had requires_grad=False when the model was boosted and has True now; set it "
                    "before booster.boost, which lays out gradients and optimizer "
                    "state for the trainable parameters, or call booster.reboost(model, optimizer) "
                    "now");
}

UsageError moved_into_shared_memory(const std::string& param) {
  return UsageError(parameter(param) +
                    " was moved into memory that processes share, after booster.boost "
                    "(share_memory_(), a torch.multiprocessing queue): the others would never see "
                    "what castor does with its chunk. Send them a .clone(), or copy.deepcopy of "
                    "the model");
}

UsageError other_kind_of_memory(const std::string& param, const std::string& given,
                                const std::string& own) {
  return UsageError(parameter(param) +
                    " was given other memory after booster.boost, of another shape, type or device "
                    "(by model.to(), .half(), param.data = ...): it is " +
                    given + ", and its chunk holds " + own +
                    ". Assign such a tensor, or write into it in place: param.copy_(values)");
}

UsageError memory_of_parameter(const std::string& param, const std::string& other) {
  return UsageError(parameter(param) + " was given the memory of " + parameter(other) +
                    " after booster.boost (param.data = other.data), and they would part ways "
                    "in their chunks: assign other.data.clone(), or tie them before boost, by "
                    "assigning the one Parameter to both modules");
}

UsageError memory_of_other_model(const std::string& param) {
  return UsageError(parameter(param) +
                    " was given the memory of a parameter of another boosted model (param.data = "
                    "other.data), which that keeps in a chunk of its own: assign "
                    "other.data.clone()");
}

UsageError memory_that_processes_share(const std::string& param) {
  return UsageError(parameter(param) +
                    " was given memory that processes share (param.data = shared), and the others "
                    "would not see what castor does with its chunk: assign shared.clone(), and "
                    "copy values back with shared.copy_(param)");
}

InvalidArgument values_of_other_shape(std::pair<std::int64_t, std::int64_t> given,
                                      std::pair<std::int64_t, std::int64_t> own) {
  return InvalidArgument("values of " + std::to_string(given.first) + " elements in " +
                         std::to_string(given.second) +
                         " dimensions do not have the shape of their parameter, which has " +
                         std::to_string(own.first) + " in " + std::to_string(own.second));
}

InvalidArgument other_number_of_states(const std::string& param, std::size_t own,
                                       std::size_t given) {
  return InvalidArgument(parameter(param) + " has " + std::to_string(own) + " states, and " +
                         std::to_string(given) + " were given");
}

InvalidArgument states_of_other_layout(const std::string& param, std::string_view states) {
  return InvalidArgument(std::string(states) + " of " + parameter(param) +
                         " differ in shape, strides or type from what read gives");
}

InvalidArgument other_experts(const std::string& param, std::int64_t own, std::int64_t of_layer) {
  return InvalidArgument(parameter(param) + " has " + std::to_string(own) +
                         " experts in its first dimension, of " + std::to_string(of_layer) +
                         " in its layer; they have to be as many, and contiguous");
}

UsageError activation_written(std::uint32_t version, std::uint32_t expected) {
  return UsageError(
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: a tensor that a block with activations=\"offload\" saved is at version " +
      std::to_string(version) + "; expected version " + std::to_string(expected) + " instead");
}

UsageError collective_outlives_memory(const std::string& operation) {
  return UsageError(operation +
                    " was given a parameter or gradient that is on NVMe, or sharded over ranks, "
                    "whose memory it would use after the call: give it a .clone() and copy the "
                    "result back");
}

const std::string& in_forked_child() {
  static const std::string message =
      "this process was forked from the one that boosted the model, which keeps the memory of its "
      "parameters, gradients and optimizer states to itself; compute with them there, give the "
      "child a .clone() made before the fork, or start it with the 'spawn' method";
  return message;
}

}  // namespace castor::tensor_errors
