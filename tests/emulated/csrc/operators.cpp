// Operators: their results' shapes are found on the host, their CPU kernels run in a stream's thread.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <unordered_map>

#include "tensors.h"

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// ---- memory and views ---------------------------------------------------------------------------

c10::Device own_device(std::optional<c10::Device> asked) {
  auto device = c10::device_or_default(asked);
  return {kType, device.has_index() ? device.index() : c10::DeviceIndex(current_device())};
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                           std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(own_device(device));
  return at::detail::empty_generic(size, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(own_device(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor empty_like_of(const Tensor& shape, const c10::Device& device) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return self.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t length = int64_t(source.nbytes() / self.itemsize());
  return self.set_(std::move(source), 0, {length}, {});
}

Tensor& set_storage_part(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(source));
  own->set_storage_offset(offset);
  if (stride.empty()) {
    own->set_sizes_contiguous(size);
  } else {
    own->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto own = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), own);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(Tensor& self, c10::Stream stream) {
  use_in_stream(self.storage().data_ptr().get_context(), stream.id());
}

// ---- copies -------------------------------------------------------------------------------------

void copy_now(const Tensor& to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

Tensor host_view(const Tensor& tensor) {
  return read_alike(at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.options()), tensor);
}

void keep_pinned(const Tensor& tensor, const c10::Device& device) {
  pinned_allocator().record_event(tensor.mutable_data_ptr(), tensor.storage().data_ptr().get_context(),
                                  torch_stream(device.index(), current_stream(device.index())));
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  bool crosses = from.device() != to.device();
  Stream &source = current(from.device()), &target = current(to.device());
  if (crosses) wait_in_stream(source, record(target));
  launch(source, "copy_", {access(from, false), access(to, true)}, [a = host_alias(from), b = host_alias(to)] { copy_now(b, a); });
  if (crosses) wait_in_stream(target, record(source));
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  Stream& stream = current(to.device());
  if (!(from.is_pinned() && non_blocking)) {
    count_synchronization(non_blocking ? "non_blocking copy from pageable memory" : "copy from the host");
    launch(stream, "copy_", {access(to, true)}, [a = from.clone(), b = host_alias(to)] { copy_now(b, a); });
    if (!non_blocking) wait_for_stream(stream);
    return;
  }
  keep_pinned(from, to.device());
  launch(stream, "copy_", {access(to, true)},
         [a = host_view(from), then = from.clone(), b = host_alias(to), line = python_line()] {
           at::AutoDispatchBelowADInplaceOrView below;
           if (a.is_contiguous() && std::memcmp(a.const_data_ptr(), then.const_data_ptr(), a.nbytes()) != 0)
             report_hazard("pinned memory changed before its copy to the device", line);
           b.copy_(a);
         });
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  Stream& stream = current(from.device());
  bool waits = !(to.is_pinned() && non_blocking);
  if (waits) {
    count_synchronization("copy to the host");
  } else {
    keep_pinned(to, from.device());
    // Who reads too early shall not find the numbers of the last copy, which may be nearly right.
    if (to.is_contiguous()) std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
  }
  launch(stream, "copy_", {access(from, false)}, [a = host_alias(from), b = host_view(to)] { copy_now(b, a); });
  if (waits) wait_for_stream(stream);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  // The CPU's copy would broadcast later, in the stream.
  Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (from.is_cpu()) {
    copy_to_device(source, to, non_blocking);
  } else if (to.is_cpu()) {
    copy_to_host(source, to, non_blocking);
  } else {
    copy_on_device(source, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  count_synchronization("item");
  Stream& stream = current(self.device());
  Tensor source = host_alias(self), found = at::empty({}, source.options());
  launch(stream, "item", {access(self, false)}, [source, found] { copy_now(found, source.reshape(c10::IntArrayRef{})); });
  wait_for_stream(stream);
  return found.item();
}

// ---- what an operator returns -------------------------------------------------------------------

// A tensor that an operator returns: one of its arguments, a view of one, or a new one.
struct Output {
  enum Kind { kUndefined, kArgument, kView, kNew } kind = kUndefined;
  size_t argument = 0;  // Among the device tensors of the arguments.
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
};
struct Outputs {
  std::vector<std::vector<Output>> by_return;
  std::vector<bool> is_list;
};

// Appends what determines the shapes of an operator's results; false if that is not known.
bool describe(std::string& key, const IValue& value) {
  auto number = [&](int64_t n) { key.append(reinterpret_cast<const char*>(&n), sizeof n); };
  auto tensor = [&](const Tensor& t) {
    if (!t.defined()) {
      key += 'u';
      return;
    }
    key += 't';
    number(t.dim());
    for (auto n : t.sizes()) number(n);
    for (auto n : t.strides()) number(n);
    number(int64_t(t.scalar_type()));
    number(t.unsafeGetTensorImpl()->is_wrapped_number());
    number(int64_t(t.device().type()));
  };
  if (value.isTensor()) {
    tensor(value.toTensor());
  } else if (value.isTensorList()) {
    key += 'T';
    number(value.toTensorVector().size());
    for (const Tensor& each : value.toTensorVector()) tensor(each);
  } else if (value.isOptionalTensorList()) {
    key += 'O';
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) tensor(each ? *each : Tensor());
    key += ';';
  } else if (value.isNone()) {
    key += 'n';
  } else if (value.isBool()) {
    key += value.toBool() ? 'y' : 'x';
  } else if (value.isInt()) {
    key += 'i';
    number(value.toInt());
  } else if (value.isDouble()) {
    key += 'd';
    double n = value.toDouble();
    key.append(reinterpret_cast<const char*>(&n), sizeof n);
  } else if (value.isIntList()) {
    key += 'I';
    number(value.toIntVector().size());
    for (auto n : value.toIntVector()) number(n);
  } else if (value.isBoolList()) {
    key += 'B';
    for (bool each : value.toBoolList()) key += each ? 'y' : 'x';
  } else if (value.isString()) {
    key += 's' + value.toStringRef() + '\0';
  } else if (value.isGenerator()) {
    key += 'g';
  } else if (value.isDevice()) {
    key += 'D';
  } else {
    return false;
  }
  return true;
}

template <typename F>
IValue each_tensor(const IValue& value, c10::DeviceType device, F&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& each : value.toTensorVector()) changed.push_back(change(each));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      changed.push_back(each ? std::optional<Tensor>(change(*each)) : std::nullopt);
    return changed;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(device);
  return value;
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (auto& each : schema.returns()) {
    bool is_tensor = each.type()->isSubtypeOf(*c10::OptionalType::create(c10::TensorType::get())) ||
                     each.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!is_tensor) return false;
  }
  return true;
}

// ---- a call of an operator ----------------------------------------------------------------------

// The numbers of elements that these return depend on values, so that the host has to wait for them.
const std::set<std::string> kDependOnValues = {
    "aten::nonzero",      "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave", "aten::bincount"};

// Mean and rstd of a layer norm are float32 on an accelerator, whatever its input; the CPU's kernel
// wants them in the dtype of the weight.
void use_statistics_of_cpu(Stack& arguments) {
  Tensor weight = arguments[5].isTensor() ? arguments[5].toTensor() : Tensor();
  auto dtype = (weight.defined() ? weight : arguments[1].toTensor()).scalar_type();
  for (size_t i : {3, 4}) arguments[i] = arguments[i].toTensor().to(dtype);
}

std::mutex generators;

void run_on_cpu(const c10::OperatorHandle& op, Stack& arguments, int generator_at) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (op.schema().name() == "aten::native_layer_norm_backward") use_statistics_of_cpu(arguments);
  if (generator_at < 0) {
    op.callBoxed(&arguments);
    return;
  }
  // CPU kernels accept a CPU's generator only: they get a copy, and its state is copied back.
  std::lock_guard<std::mutex> lock(generators);
  at::Generator own = arguments[generator_at].toGenerator();
  auto* state = static_cast<at::CPUGeneratorImpl*>(own.unsafeGetGeneratorImpl());
  at::Generator copy = at::make_generator<at::CPUGeneratorImpl>();
  auto* copied = static_cast<at::CPUGeneratorImpl*>(copy.unsafeGetGeneratorImpl());
  auto pass = [](at::CPUGeneratorImpl* from, at::CPUGeneratorImpl* to) {
    to->set_engine(from->engine());
    to->set_next_float_normal_sample(from->next_float_normal_sample());
    to->set_next_double_normal_sample(from->next_double_normal_sample());
  };
  pass(state, copied);
  arguments[generator_at] = copy;
  op.callBoxed(&arguments);
  pass(copied, state);
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), count_(schema_.arguments().size()), base_(stack->size() - count_) {
    for (size_t i = 0; i < count_; i++) look(i);
    if (!device_) device_ = c10::Device(kType, c10::DeviceIndex(current_device()));
    needs_values_ = kDependOnValues.count(schema_.name()) || !returns_tensors(schema_) || has_mask_;
  }

  void run() {
    if (has_host_tensor_) move_indices();
    c10::DeviceGuard guard(*device_);
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::shared_ptr<const Outputs> outputs;
    if (!needs_values_) outputs = find_outputs();
    finish(outputs ? later(*outputs) : now());
  }

 private:
  const IValue& argument(size_t i) const { return (*stack_)[base_ + i]; }
  Stream& stream() const { return current(*device_); }

  void look(size_t i) {
    const auto& declared = schema_.arguments()[i];
    bool is_write = declared.alias_info() && declared.alias_info()->isWrite();
    const IValue& value = argument(i);
    if (declared.name() == "generator") generator_at_ = int(i);
    if (value.isDevice() && value.toDevice().type() == kType && !device_) device_ = own_device(value.toDevice());
    each_tensor(value, kType, [&](const Tensor& tensor) {
      look(tensor, is_write);
      has_mask_ |= value.isOptionalTensorList() && tensor.defined() && tensor.scalar_type() == at::kBool;
      return tensor;
    });
  }

  void look(const Tensor& tensor, bool is_write) {
    if (!tensor.defined()) return;
    if (tensor.device().type() != kType) {
      has_host_tensor_ |= tensor.is_cpu() && tensor.dim() > 0;
      return;
    }
    TORCH_CHECK(!device_ || *device_ == tensor.device(), "Expected all tensors to be on the same device, but found ",
                device_->str(), " and ", tensor.device().str(), " (", schema_.name(), ")");
    device_ = tensor.device();
    tensors_.push_back(tensor);
    accesses_.push_back(access(tensor, is_write));
  }

  // torch copies indices on the host to the device, and refuses other tensors there.
  void move_indices() {
    TORCH_CHECK(schema_.name().rfind("aten::index", 0) == 0 || schema_.name() == "aten::_index_put_impl_",
                "Expected all tensors to be on the same device, but found at least two devices, ", device_->str(),
                " and cpu! (", schema_.name(), ")");
    for (size_t i = 0; i < count_; i++) {
      IValue& value = (*stack_)[base_ + i];
      if (!value.isOptionalTensorList()) continue;
      value = each_tensor(value, kType, [&](const Tensor& each) { return each.defined() ? each.to(*device_) : each; });
    }
  }

  Stack arguments_for(c10::DeviceType device, const std::function<Tensor(const Tensor&)>& change) const {
    Stack made;
    for (size_t i = 0; i < count_; i++)
      made.push_back(each_tensor(argument(i), device, [&](const Tensor& each) {
        return each.defined() && each.device().type() == kType ? change(each) : each;
      }));
    return made;
  }

  Stack cpu_arguments() const {
    Stack made = arguments_for(c10::kCPU, [](const Tensor& each) { return host_alias(each); });
    for (size_t i = 0; i < count_; i++) {  // A number on the host is passed by value at the launch.
      if (!argument(i).isTensor()) continue;
      const Tensor& own = argument(i).toTensor();
      if (!own.defined() || !own.is_cpu()) continue;
      Tensor copy = own.clone();
      read_alike(copy, own);
      made[i] = copy;
    }
    if (generator_at_ >= 0 && made[generator_at_].isNone()) made[generator_at_] = default_generator(device_->index());
    return made;
  }

  // The results' shapes, from a kernel for tensors without data; remembered, because such a kernel
  // may be in Python. Null if there is none.
  std::shared_ptr<const Outputs> find_outputs() {
    static std::mutex mutex;
    static auto* known = new std::unordered_map<std::string, std::shared_ptr<const Outputs>>;
    std::string key = schema_.name() + "." + schema_.overload_name() + '\0';
    bool is_known = true;
    for (size_t i = 0; i < count_ && is_known; i++) is_known = describe(key, argument(i));
    for (size_t i = 0; i < tensors_.size(); i++)
      for (size_t j = 0; j < i; j++)
        if (tensors_[i].is_same(tensors_[j])) key += "=" + std::to_string(i) + "," + std::to_string(j);
    if (is_known) {
      std::lock_guard<std::mutex> lock(mutex);
      auto it = known->find(key);
      if (it != known->end()) return it->second;
    }
    bool resized = false;
    auto found = run_on_meta(resized);
    if (found && is_known && !resized) {
      std::lock_guard<std::mutex> lock(mutex);
      known->emplace(key, found);
    }
    return found;
  }

  std::shared_ptr<const Outputs> run_on_meta(bool& resized) {
    std::vector<Tensor> twins;
    auto twin_of = [&](const Tensor& own) {
      for (size_t i = 0; i < twins.size(); i++)
        if (tensors_[i].is_same(own)) return twins[i];
      return Tensor();
    };
    for (auto& own : tensors_) {
      Tensor twin = twin_of(own);
      if (!twin.defined()) {
        twin = at::empty_strided(own.sizes(), own.strides(), own.options().device(c10::kMeta));
        read_alike(twin, own);
      }
      twins.push_back(twin);
    }
    Stack arguments = arguments_for(c10::kMeta, twin_of);
    if (generator_at_ >= 0) arguments[generator_at_] = IValue();
    at::DisableRecordFunctionGuard unseen;  // By a profiler: a real device runs nothing here.
    try {
      op_.callBoxed(&arguments);
    } catch (const c10::NotImplementedError&) {
      return nullptr;
    }
    for (size_t i = 0; i < twins.size(); i++) {
      if (tensors_[i].sizes() == twins[i].sizes()) continue;
      tensors_[i].resize_(twins[i].sizes());  // The result of an operator with out=.
      resized = true;
    }
    if (resized) renew_accesses();
    auto outputs = std::make_shared<Outputs>();
    for (auto& value : arguments) {
      std::vector<Output> found;
      each_tensor(value, kType, [&](const Tensor& tensor) {
        found.push_back(output_of(tensor, twins));
        return tensor;
      });
      outputs->by_return.push_back(std::move(found));
      outputs->is_list.push_back(value.isTensorList());
    }
    return outputs;
  }

  static Output output_of(const Tensor& tensor, const std::vector<Tensor>& twins) {
    Output made;
    if (!tensor.defined()) return made;
    made.kind = Output::kNew;
    made.sizes = tensor.sizes().vec();
    made.strides = tensor.strides().vec();
    made.dtype = tensor.scalar_type();
    for (size_t i = 0; i < twins.size() && made.kind == Output::kNew; i++) {
      made.argument = i;
      if (twins[i].is_same(tensor)) {
        made.kind = Output::kArgument;
      } else if (twins[i].storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        TORCH_CHECK(twins[i].dtype() == tensor.dtype(), "emulated device: cannot view ", twins[i].dtype(), " as ", tensor.dtype());
        made.kind = Output::kView;
        made.offset = tensor.storage_offset();
      }
    }
    return made;
  }

  void renew_accesses() {
    for (size_t i = 0; i < tensors_.size(); i++) accesses_[i] = access(tensors_[i], accesses_[i].is_write);
  }

  // The argument that an operator writes into and returns.
  std::optional<IValue> written(const c10::Argument& returned) const {
    if (!returned.alias_info() || !returned.alias_info()->isWrite()) return std::nullopt;
    for (size_t i = 0; i < count_; i++) {
      const auto* declared = schema_.arguments()[i].alias_info();
      if (declared && declared->isWrite() && declared->beforeSets() == returned.alias_info()->beforeSets()) return argument(i);
    }
    return std::nullopt;
  }

  std::vector<IValue> later(const Outputs& outputs) {
    struct New {
      size_t at, position;
      Tensor target;
    };
    std::vector<New> made;
    std::vector<IValue> results;
    const size_t number = schema_.returns().size();
    bool computes = number == 0;
    for (size_t k = 0; k < number; k++) {
      if (auto argument = written(schema_.returns()[k])) {
        results.push_back(*argument);
        computes = true;
        continue;
      }
      std::vector<Tensor> tensors;
      for (auto& each : outputs.by_return[k]) {
        tensors.push_back(make(each));
        if (each.kind != Output::kNew) continue;
        made.push_back({k, tensors.size() - 1, host_alias(tensors.back())});
        accesses_.push_back(access(tensors.back(), true));
        computes = true;
      }
      results.push_back(outputs.is_list[k] ? IValue(c10::List<Tensor>(tensors)) : IValue(tensors.at(0)));
    }
    if (computes) {
      launch(stream(), schema_.name().c_str(), accesses_,
             [op = op_, arguments = cpu_arguments(), made = std::move(made), number, generator_at = generator_at_]() mutable {
               run_on_cpu(op, arguments, generator_at);
               at::AutoDispatchBelowADInplaceOrView below;
               for (auto& each : made) {
                 const IValue& value = arguments[arguments.size() - number + each.at];
                 Tensor result = value.isTensor() ? value.toTensor() : value.toTensorVector().at(each.position);
                 // Batch norm's statistics are empty on a CPU when it evaluates.
                 if (each.target.numel() && result.numel()) each.target.copy_(result);
               }
             });
    }
    return results;
  }

  Tensor make(const Output& output) const {
    switch (output.kind) {
      case Output::kUndefined:
        return {};
      case Output::kArgument:
        return tensors_[output.argument];
      case Output::kView: {
        const Tensor& own = tensors_[output.argument];
        return at::native::as_strided_tensorimpl(own, output.sizes, output.strides, own.storage_offset() + output.offset);
      }
      default:
        return at::empty_strided(output.sizes, output.strides, at::TensorOptions().dtype(output.dtype).device(*device_));
    }
  }

  // The host waits, because what the operator returns depends on values.
  std::vector<IValue> now() {
    count_synchronization("result of " + schema_.name());
    launch(stream(), schema_.name().c_str(), accesses_, [] {});
    wait_for_stream(stream());
    Stack arguments = cpu_arguments();
    run_on_cpu(op_, arguments, generator_at_);
    const size_t number = schema_.returns().size();
    std::vector<IValue> results;
    for (size_t k = 0; k < number; k++) {
      if (auto argument = written(schema_.returns()[k])) {
        results.push_back(*argument);
        continue;
      }
      results.push_back(each_tensor(arguments[arguments.size() - number + k], kType, [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        Tensor own = empty_like_of(tensor, *device_);
        if (tensor.numel()) host_alias(own).copy_(tensor);
        return own;
      }));
    }
    return results;
  }

  void finish(std::vector<IValue> results) {
    torch::jit::drop(*stack_, count_);
    for (auto& each : results) stack_->push_back(std::move(each));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t count_, base_;
  std::optional<c10::Device> device_;
  std::vector<Tensor> tensors_;  // Those of the device, in order.
  std::vector<Access> accesses_;
  bool has_host_tensor_ = false, has_mask_ = false, needs_values_ = false;
  int generator_at_ = -1;
};

void call(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("resize_", &resize);
  m.impl("view", &view);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_part);
  m.impl("record_stream", &record_stream);
  // torch would take them apart: a layer norm into other operators, a convolution into those of kinds
  // of devices, a loss into one with an output, which the CPU's kernel then resizes.
  for (const char* each : {"native_layer_norm", "convolution", "convolution_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(each, torch::CppFunction::makeFromBoxedFunction<&call>());
}

// A copy reads conjugated and negated numbers as such; torch would copy them first, and so for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace emulated

namespace at::native {
namespace {
int64_t choose_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                    std::optional<double>, bool) {
  return 0;
}
}  // namespace
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_math);
}  // namespace at::native
