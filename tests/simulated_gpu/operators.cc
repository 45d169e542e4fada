// torch's operators on the simulated GPU: each that has a kernel for the CPU is enqueued on the
// current stream and runs that kernel there, later, over the same memory.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator.h"

namespace castor::simulated {
namespace {

using c10::IValue;
using Stack = ::torch::jit::Stack;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kType; }

/// What a kernel finds where the tensor is: only the address, nothing that keeps the memory.
at::Tensor host_view(const at::Tensor& tensor) {
  const c10::InferenceMode normal(false);  // the stream's thread writes it, in no such mode
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0)
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* const data = tensor.mutable_data_ptr();
  TORCH_CHECK(device_memory().contains(data) || Gpu::instance().is_registered(data),
              "the simulated GPU cannot address ", data,
              ": that is neither its memory nor "
              "page-locked host memory");
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

at::Tensor shape_of(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

/// A scalar that lies on the CPU: its value now.
at::Tensor scalar_copy(const at::Tensor& tensor) {
  at::Tensor copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

/// Each tensor of an argument, also of lists, replaced by what `replace` makes of it.
template <typename Replace>
IValue with_tensors(const IValue& value, const Replace& replace) {
  if (value.isTensor())
    return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(tensor.defined() ? replace(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
      list.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : tensor);
    return list;
  }
  return value;
}

template <typename Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  static_cast<void>(with_tensors(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  }));
}

enum class Place { kHost, kShape };

/// The arguments as a kernel of the CPU, or of shapes alone, takes them.
Stack arguments_for(Place place, const Stack& arguments) {
  Stack stack;
  for (const IValue& value : arguments) {
    if (value.isDevice()) {
      stack.emplace_back(c10::Device(place == Place::kHost ? at::kCPU : at::kMeta));
    } else {
      stack.push_back(with_tensors(value, [place](const at::Tensor& tensor) {
        if (!on_device(tensor))
          return scalar_copy(tensor);
        return place == Place::kHost ? host_view(tensor) : shape_of(tensor);
      }));
    }
  }
  return stack;
}

/// What the shapes of an operator's results follow from, of one argument; false: of more than that.
bool describe(const IValue& value, std::ostream& text) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      text << 'u';
    } else if (on_device(tensor)) {
      text << 't' << tensor.scalar_type() << tensor.sizes() << tensor.strides();
    } else {
      text << 's' << tensor.scalar_type() << tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return tensor.dim() == 0;
    }
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    const auto list = value.toListRef();
    text << 'l' << list.size();
    return std::all_of(list.begin(), list.end(),
                       [&](const IValue& each) { return describe(each, text); });
  } else {
    text << value.tagKind() << value;
    return value.isNone() || value.isScalar() || value.isString() || value.isDevice() ||
           value.isIntList() || value.isDoubleList() || value.isBoolList();
  }
  return true;
}

/// Shapes of results by what describe() says of the arguments: many come from torch's Python, which
/// takes a thousand times as long as a small kernel. Nothing: only values tell. Thread-safe.
class KnownShapes {
 public:
  static KnownShapes& instance() {
    static auto* const known = new KnownShapes;
    return *known;
  }
  [[nodiscard]] const std::optional<Stack>* find(const std::string& key) const {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(key);
    return found == known_.end() ? nullptr : &found->second;
  }
  void add(const std::string& key, std::optional<Stack> shapes) {
    const std::lock_guard lock(mutex_);
    known_.emplace(key, std::move(shapes));  // stays where it is
  }

 private:
  mutable std::mutex mutex_;  // guards known_
  std::unordered_map<std::string, std::optional<Stack>> known_;
};

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// An operator with its arguments on the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {
    const std::size_t count = op.schema().arguments().size();
    arguments_.assign(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    ::torch::jit::drop(*stack, count);
    for (IValue& value : arguments_)
      value = with_tensors(value, [this](const at::Tensor& tensor) { return check(tensor); });
  }

  void run() {
    if (is_view())
      return view();
    if (draws_random_numbers())
      return is_filled_whole() ? fill() : run_now();
    if (!(only_writes() ? shapes_fit() : infer()))
      return run_now();
    enqueue();
  }

 private:
  /// As on a GPU, only scalars and the indices of indexing come from the CPU.
  at::Tensor check(const at::Tensor& tensor) const {
    if (on_device(tensor) || tensor.dim() == 0)
      return tensor;
    const std::string& name = op_.schema().name();
    TORCH_CHECK(name.find("index") != std::string::npos && tensor.device().is_cpu(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                kDevice, " and ", tensor.device(), " (", name, ")");
    return tensor.to(kDevice);
  }

  [[nodiscard]] const std::vector<c10::Argument>& parameters() const {
    return op_.schema().arguments();
  }
  [[nodiscard]] const std::vector<c10::Argument>& results() const { return op_.schema().returns(); }

  [[nodiscard]] bool is_view() const {
    return !results().empty() && results()[0].alias_info() != nullptr &&
           !results()[0].alias_info()->isWrite();
  }
  [[nodiscard]] bool draws_random_numbers() const {
    return op_.hasTag(at::Tag::nondeterministic_seeded);
  }
  /// normal_, bernoulli_(p) ...: what it writes depends on nothing but sizes and numbers.
  [[nodiscard]] bool is_filled_whole() const {
    std::size_t tensors = 0;
    for (const IValue& value : arguments_)
      for_each_tensor(value, [&](const at::Tensor&) { ++tensors; });
    return tensors == 1 && writes(parameters()[0]) && arguments_[0].isTensor();
  }
  /// In place: every result is an argument, whose size stays.
  [[nodiscard]] bool only_writes() const {
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      if (writes(parameters()[i]) && parameters()[i].is_out())
        return false;
    }
    for (const c10::Argument& result : results()) {
      if (!writes(result))
        return false;
    }
    return true;
  }

  /// Sizes and types of the results from those of the arguments; false: only values tell.
  bool infer() {
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta))
      return false;
    const std::optional<Stack> inferred = known_shapes();
    if (!inferred)
      return false;
    const Stack& shapes = *inferred;
    made_.assign(results().size(), IValue());
    for (std::size_t i = 0; i < results().size(); ++i) {
      if (!writes(results()[i]))
        made_[i] = with_tensors(shapes[i], [&](const at::Tensor& shape) {
          return at::empty_strided(
              shape.sizes(), shape.strides(),
              at::TensorOptions().dtype(type_of_result(i, shape.scalar_type())).device(kDevice));
        });
    }
    return true;
  }

  /// Of an operator in place; false: its kernel says at once what is wrong, as a GPU's does.
  [[nodiscard]] bool shapes_fit() const {
    return !op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) || known_shapes();
  }

  /// nullopt: only values tell, or there are none.
  [[nodiscard]] std::optional<Stack> known_shapes() const {
    const std::optional<std::string> key = what_shapes_follow_from();
    const std::optional<Stack>* const known = key ? KnownShapes::instance().find(*key) : nullptr;
    if (known != nullptr)
      return *known;
    std::optional<Stack> inferred = shapes_of_results();
    if (key)
      KnownShapes::instance().add(*key, inferred);
    return inferred;
  }

  /// nullopt: they are asked for each time.
  [[nodiscard]] std::optional<std::string> what_shapes_follow_from() const {
    std::ostringstream text;
    text << std::hexfloat << op_.operator_name() << c10::get_default_dtype().name();
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      text << ';';
      if (parameters()[i].is_out() || !describe(arguments_[i], text))
        return std::nullopt;
    }
    return text.str();
  }

  /// nullopt: only values tell.
  [[nodiscard]] std::optional<Stack> shapes_of_results() const {
    Stack shapes = arguments_for(Place::kShape, arguments_);
    const Stack before = shapes;
    try {
      const at::AutoDispatchBelowAutograd below;
      op_.callBoxed(&shapes);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (std::size_t i = 0; i < results().size(); ++i) {
      if (!shapes[i].isTensor() && !shapes[i].isTensorList())
        return std::nullopt;
    }
    // An out= argument has the size that its shape was given.
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      if (parameters()[i].is_out() && arguments_[i].isTensor())
        resize(arguments_[i].toTensor(), before[i].toTensor().sizes());
    }
    return shapes;
  }

  /// The CPU's layer norm keeps its statistics in the type of what it is given, where a GPU's,
  /// whose shapes these are, keeps them in float32.
  [[nodiscard]] at::ScalarType type_of_result(std::size_t i, at::ScalarType inferred) const {
    if (op_.schema().name() != "aten::native_layer_norm" || i == 0)
      return inferred;
    const at::ScalarType input = arguments_[0].toTensor().scalar_type();
    const IValue& weight = arguments_[2];
    const bool mixed = weight.isTensor() && weight.toTensor().defined() &&
                       weight.toTensor().scalar_type() != input;
    return mixed ? inferred : input;
  }

  static void resize(const at::Tensor& out, at::IntArrayRef sizes) {
    if (out.sizes() != sizes)
      out.resize_(sizes);
  }

  /// What the operator gives back: what was made, or the arguments that it writes, in order.
  void push_results() {
    std::size_t next = 0;
    for (std::size_t i = 0; i < results().size(); ++i) {
      if (!writes(results()[i])) {
        stack_->push_back(made_.at(i));
        continue;
      }
      while (!writes(parameters()[next]))
        ++next;
      stack_->push_back(arguments_[next++]);
    }
  }

  void enqueue() {
    std::vector<IValue> targets;
    for (const IValue& made : made_)
      targets.push_back(with_tensors(made, host_view));
    current_queue()->enqueue([op = op_, stack = arguments_for(Place::kHost, arguments_),
                              targets = std::move(targets)]() mutable {
      const at::NoGradGuard no_grad;
      const at::AutoDispatchBelowAutograd below;
      try {
        op.callBoxed(&stack);
      } catch (const c10::Error& error) {
        throw std::runtime_error(op.schema().name() + ": " + error.what_without_backtrace());
      }
      for (std::size_t i = 0; i < targets.size(); ++i)
        copy_results(stack[i], targets[i]);
    });
    push_results();
  }

  static void copy_results(const IValue& results, const IValue& targets) {
    std::vector<at::Tensor> from;
    for_each_tensor(results, [&](const at::Tensor& tensor) { from.push_back(tensor); });
    if (from.empty())
      return;  // an output_mask left it out, and nobody reads it
    std::size_t next = 0;
    for_each_tensor(targets, [&](const at::Tensor& target) {
      const at::Tensor& source = from.at(next++);
      if (source.dim() == 1 && source.numel() == 0)
        return;  // statistics that a batch norm in evaluation leaves out
      TORCH_CHECK(source.sizes() == target.sizes() && source.dtype() == target.dtype(),
                  "a kernel gave ", source.sizes(), " of ", source.dtype(),
                  " where its shapes said ", target.sizes(), " of ", target.dtype());
      target.copy_(source);
    });
  }

  /// Values decide: on the calling thread, when the stream has come to it.
  void run_now() {
    ++counts().host_waits;
    current_queue()->synchronize();
    check_device();
    Stack stack = arguments_for(Place::kHost, arguments_);
    // The kernel may give an out= argument another size.
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      if (parameters()[i].is_out() && arguments_[i].isTensor()) {
        stack[i] = at::empty({0}, stack[i].toTensor().options());
        outs.emplace_back(arguments_[i].toTensor(), stack[i].toTensor());
      }
    }
    {
      const at::AutoDispatchBelowAutograd below;
      op_.callBoxed(&stack);
    }
    for (const auto& [target, source] : outs) {
      resize(target, source.sizes());
      write(target, source);
    }
    made_.assign(results().size(), IValue());
    for (std::size_t i = 0; i < results().size(); ++i) {
      if (writes(results()[i]))
        continue;
      made_[i] = with_tensors(stack[i], [](const at::Tensor& tensor) {
        const at::Tensor made =
            at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
        write(made, tensor);
        return made;
      });
    }
    push_results();
  }

  static void write(const at::Tensor& target, const at::Tensor& source) {
    if (target.numel() > 0)
      current_queue()->enqueue([target = host_view(target), source] { target.copy_(source); });
  }

  /// The numbers are drawn at once, in the order of the program, and written in that of the stream.
  void fill() {
    Stack stack = arguments_for(Place::kShape, arguments_);
    const at::Tensor target = arguments_[0].toTensor();
    const at::Tensor drawn =
        at::empty_strided(target.sizes(), target.strides(), target.options().device(at::kCPU));
    stack[0] = drawn;
    {
      const at::AutoDispatchBelowAutograd below;
      op_.callBoxed(&stack);
    }
    write(target, drawn);
    stack_->push_back(target);
  }

  /// A tensor over the memory of the first argument, with the geometry that its shape gets.
  void view() {
    const at::Tensor base = arguments_.at(0).toTensor();
    const auto bytes = static_cast<std::int64_t>(base.storage().nbytes());
    const auto size = static_cast<std::int64_t>(base.dtype().itemsize());
    const at::Tensor all = at::empty({bytes / size}, base.options().device(at::kMeta));
    Stack stack = arguments_for(Place::kShape, arguments_);
    stack[0] = all.as_strided(base.sizes(), base.strides(), base.storage_offset());
    {
      const at::AutoDispatchBelowAutograd below;
      op_.callBoxed(&stack);
    }
    for (const IValue& result : stack) {
      stack_->push_back(with_tensors(result, [&](const at::Tensor& shape) {
        at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), shape.dtype());
        view.unsafeGetTensorImpl()->set_storage_offset(shape.storage_offset());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
        return view;
      }));
    }
  }

  const c10::OperatorHandle& op_;
  Stack* const stack_;
  Stack arguments_;
  std::vector<IValue> made_;  // per result; nothing where it is an argument
};

void run_operator(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// --- what is no kernel ---------------------------------------------------------------------------

c10::Allocator* allocator() { return c10::cuda::CUDACachingAllocator::get(); }
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                 std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> /*device*/, std::optional<bool> /*pin_memory*/) {
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kKeys,
                                           c10::dtype_or_default(type));
}

void grow(c10::StorageImpl& storage, std::size_t bytes) {
  if (storage.nbytes() >= bytes)
    return;
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr larger = allocator()->allocate(bytes);
  if (storage.nbytes() > 0)
    allocator()->copy_data(larger.get(), storage.data(), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve)
    impl.empty_tensor_restride(*format);
  grow(*self.storage().unsafeGetStorageImpl(),
       static_cast<std::size_t>(self.storage_offset() + self.numel()) * self.itemsize());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(source), offset, sizes, strides);
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_storage_offset(offset);
  if (strides.empty()) {
    impl.set_sizes_contiguous(sizes);
  } else {
    impl.set_sizes_and_strides(sizes, strides);
  }
  grow(*self.storage().unsafeGetStorageImpl(),
       at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                        static_cast<std::size_t>(offset)));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<std::int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

bool page_locked(const at::Tensor& tensor) {
  return tensor.numel() > 0 && Gpu::instance().is_registered(tensor.const_data_ptr());
}

/// As cudaMemcpyAsync: to the host, and from pageable memory without non_blocking, it waits; from
/// pageable memory with it, the bytes are taken before it returns.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0)
    return self;
  const at::Tensor from = source.expand_as(self);
  const std::shared_ptr<Stream> queue = current_queue();
  const auto enqueue = [&](at::Tensor to, at::Tensor what) {
    return queue->enqueue([to = std::move(to), what = std::move(what)] {
      const at::NoGradGuard no_grad;
      const at::AutoDispatchBelowAutograd below;
      to.copy_(what);
    });
  };
  const auto borrowed = [](const at::Tensor& tensor) {
    const c10::InferenceMode normal(false);
    return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                         at::TensorOptions().dtype(tensor.dtype()));
  };
  if (on_device(self) && on_device(from)) {
    enqueue(host_view(self), host_view(from));
  } else if (on_device(self)) {
    TORCH_CHECK(from.device().is_cpu(), "cannot copy from ", from.device(), " to ", kDevice);
    const bool stays = non_blocking && page_locked(from);
    counts().bytes_in += self.nbytes();
    enqueue(host_view(self), stays ? borrowed(from) : from.clone());
    if (!non_blocking) {
      ++counts().host_waits;
      queue->synchronize();
    }
  } else {
    TORCH_CHECK(self.device().is_cpu(), "cannot copy from ", kDevice, " to ", self.device());
    counts().bytes_out += self.nbytes();
    enqueue(borrowed(self), host_view(from));
    if (!(non_blocking && page_locked(self))) {
      ++counts().host_waits;
      queue->synchronize();
    }
  }
  if (!non_blocking && !(on_device(self) && on_device(from)))
    check_device();
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor to = target;
  return copy_(to, self, non_blocking);
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// A GPU counts integers, the CPU's kernel does not.
at::Tensor histc(const at::Tensor& self, std::int64_t bins, const at::Scalar& low,
                 const at::Scalar& high) {
  const at::Tensor input =
      at::isIntegralType(self.scalar_type(), true) ? self.to(at::kDouble) : self;
  at::Tensor counts = at::empty({bins}, input.options());
  const at::Tensor from = host_view(input);
  current_queue()->enqueue([to = host_view(counts), from, bins, low, high] {
    const at::AutoDispatchBelowAutograd below;
    to.copy_(at::histc(from, bins, low, high));
  });
  return counts.to(self.scalar_type());
}

// A parameter goes to a GPU by set_data, to a device of PrivateUse1 as well.
bool compatible(const at::Tensor& self, const at::Tensor& other) {
  return self.layout() == at::kStrided && other.layout() == at::kStrided;
}

}  // namespace

namespace {

/// As a matrix product of cuBLAS: takes addresses, then a workspace, then gives the kernel to the
/// stream, which writes the workspace before it has read its argument. float32, contiguous.
at::Tensor doubled_with_workspace(const at::Tensor& input, std::int64_t workspace_bytes) {
  at::Tensor result = at::empty_like(input);
  const auto* const from = input.const_data_ptr<float>();
  auto* const to = result.mutable_data_ptr<float>();
  const at::Tensor workspace = at::empty({workspace_bytes}, input.options().dtype(at::kByte));
  void* const scratch = workspace.mutable_data_ptr();
  current_queue()->enqueue([=, numel = input.numel()] {
    std::memset(scratch, 0xff, static_cast<std::size_t>(workspace_bytes));
    for (std::int64_t i = 0; i < numel; ++i)
      to[i] = 2 * from[i];
  });
  return result;
}

}  // namespace

TORCH_LIBRARY(simulated_gpu, m) {
  m.def("doubled_with_workspace(Tensor input, int workspace_bytes) -> Tensor");
}

TORCH_LIBRARY_IMPL(simulated_gpu, PrivateUse1, m) {
  m.impl("doubled_with_workspace", &doubled_with_workspace);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("histc", &histc);
  m.impl("record_stream", &record_stream_of);
  m.impl("_has_compatible_shallow_copy_type", &compatible);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(::torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

namespace {

/// Composites whose parts depend on the device.
bool chooses_by_device(const c10::OperatorName& name) {
  return name.overload_name.empty() &&
         (name.name == "aten::convolution" || name.name == "aten::convolution_backward");
}

}  // namespace

void add_operators_to_torch() {
  static std::vector<c10::RegistrationHandleRAII> registrations;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || !name.name.starts_with("aten::") ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    // Also where torch has a composite of other operators, so that the bits are the CPU's.
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || chooses_by_device(name)) {
      registrations.push_back(
          dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                  c10::KernelFunction::makeFromBoxedFunction<&run_operator>(),
                                  std::nullopt, nullptr, "the simulated GPU"));
    }
  }
}

}  // namespace castor::simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &_fused_sdp_choice_cpp)
}  // namespace at::native
