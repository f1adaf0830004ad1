// What torch asks of a device: the guard, its allocators, its generator and its hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "tensors.h"

namespace emulated {

c10::Stream torch_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, c10::DeviceIndex(device)), id);
}

Stream& stream_of(const c10::Stream& other) { return stream(other.device_index(), other.id()); }

Stream& current(const c10::Device& device) { return current(device.index()); }

namespace {

int index_of(const c10::Device& device) { return device.has_index() ? device.index() : current_device(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static PointPtr& point_of(void* event) { return *static_cast<PointPtr*>(event); }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, c10::DeviceIndex(exchange_device(device.index()))};
  }
  c10::Device getDevice() const override { return {kType, c10::DeviceIndex(current_device())}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(num_devices()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return c10::DeviceCapability(); }

  c10::Stream getStream(c10::Device device) const override {
    return torch_stream(index_of(device), current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return torch_stream(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return torch_stream(index_of(device), next_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return torch_stream(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_synchronization("stream.synchronize");
    wait_for_stream(stream_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    count_synchronization("synchronize");
    wait_for_device(device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new PointPtr;
    point_of(*event) = emulated::record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_in_stream(stream_of(stream), point_of(event));
  }
  bool queryEvent(void* event) const override { return !event || point_of(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_synchronization("event.synchronize");
    wait_on_host(point_of(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<PointPtr*>(event); }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(point_of(begin)->query() && point_of(end)->query(), "both events must have been reached");
    return point_of(end)->at_ms - point_of(begin)->at_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    use_in_stream(pointer.get_context(), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Tells torch's profiler of memory that has been allocated, or is about to be freed.
void report(void* address, bool is_freed) {
  if (!address || !c10::memoryProfilingEnabled()) return;
  auto [bytes, device] = allocated_at(address);
  auto numbers = statistics(device);
  c10::reportMemoryUsageToProfiler(address, is_freed ? -int64_t(bytes) : int64_t(bytes),
                                   numbers.allocated - (is_freed ? bytes : 0), numbers.reserved,
                                   c10::Device(kType, c10::DeviceIndex(device)));
}

void free_reported(void* address) {
  report(address, true);
  deallocate(address);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    void* address = nullptr;
    try {
      address = emulated::allocate(bytes, device, current_stream(device));
    } catch (const std::bad_alloc&) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "emulated device out of memory: tried to allocate ", bytes, " bytes");
    }
    report(address, false);
    return {address, address, &free_reported, c10::Device(kType, c10::DeviceIndex(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_reported; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto source = reinterpret_cast<uintptr_t>(from), target = reinterpret_cast<uintptr_t>(to);
    launch(emulated::current(current_device()), "copy_data", {{source, source + bytes, false}, {target, target + bytes, true}},
           [=] { std::memcpy(alias_of(to), alias_of(from), bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    count_synchronization("empty_cache");
    release_cached();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    use_in_stream(pointer.get_context(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto numbers = statistics(device);
    c10::CachingDeviceAllocator::DeviceStats found;
    found.allocated_bytes[0].current = found.active_bytes[0].current = numbers.allocated;
    found.allocated_bytes[0].peak = found.active_bytes[0].peak = numbers.peak_allocated;
    found.reserved_bytes[0].current = numbers.reserved;
    found.reserved_bytes[0].peak = numbers.peak_reserved;
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto numbers = statistics(device);
    size_t total = numbers.limit ? numbers.limit : 8ull << 30;
    return {total - numbers.reserved, total};
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// torch's own allocator of pinned memory, with its rules of when a block may be reused.
struct PinnedBlocks final : at::CachingHostAllocatorImpl<c10::Stream, PointPtr> {
  void allocate_host_memory(size_t bytes, void** address) override {
    *address = std::aligned_alloc(64, std::max<size_t>(64, bytes));
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[reinterpret_cast<uintptr_t>(*address)] = bytes;
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_.erase(reinterpret_cast<uintptr_t>(block->ptr_));
    std::free(block->ptr_);
  }
  void record_stream(std::optional<std::vector<PointPtr>>& events, c10::Stream stream) override {
    events->push_back(record(stream_of(stream)));
  }
  bool query_event(PointPtr& event) override { return event->query(); }
  c10::Stream get_current_stream() const override {
    return torch_stream(current_device(), current_stream(current_device()));
  }
  bool stream_is_capturing(c10::Stream) const override { return false; }
  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto after = sizes_.upper_bound(address);
    if (after == sizes_.begin()) return false;
    --after;
    return address < after->first + after->second;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, size_t> sizes_;
};
void free_pinned(void* context);
struct Pinned final : at::CachingHostAllocatorInterface<PinnedBlocks, free_pinned> {};
Pinned& pinned() {
  static auto* made = new Pinned;
  return *made;
}
void free_pinned(void* context) { pinned().free(context); }

// Its numbers are those of a CPU's generator of the same seed: CPU kernels draw them, in the streams.
// A real device counts on the host how many were drawn; here, who asks waits until all were.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kType, c10::DeviceIndex(device));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  void set_current_seed(uint64_t seed) override {
    settle(device_.index());
    CPUGeneratorImpl::set_current_seed(seed);
  }
  void set_state(const c10::TensorImpl& state) override {
    settle(device_.index());
    CPUGeneratorImpl::set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    settle(device_.index());
    return CPUGeneratorImpl::get_state();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(num_devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return c10::DeviceIndex(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  bool isPinnedPtr(const void* pointer) const override { return pinned().impl_->holds(pointer); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, c10::DeviceIndex(current_device())}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};
bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kType, &pinned());
  return true;
}();

}  // namespace

at::HostAllocator& pinned_allocator() { return pinned(); }

at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < num_devices(); i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

void seed_generators(uint64_t seed) {
  for (int device = 0; device < num_devices(); device++) default_generator(device).set_current_seed(seed);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* own = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(own->device());
  c10::DataPtr made = allocator.allocate(bytes);
  if (size_t kept = std::min(bytes, own->nbytes())) allocator.copy_data(made.get(), own->data(), kept);
  own->set_data_ptr_noswap(std::move(made));
  own->set_nbytes(bytes);
}

const at::Tensor& read_alike(const at::Tensor& made, const at::Tensor& original) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (made.is_conj() != original.is_conj()) made._set_conj(original.is_conj());
  if (made.is_neg() != original.is_neg()) made._set_neg(original.is_neg());
  return made;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  TORCH_CHECK(tensor.storage().nbytes() >= needed, "emulated device: illegal memory access: a tensor of shape ", tensor.sizes(),
              " needs ", needed, " bytes, its storage has ", tensor.storage().nbytes());
  return read_alike(at::from_blob(alias_of(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options), tensor);
}

Access access(const at::Tensor& tensor, bool is_write) {
  Access made;
  made.is_write = is_write;
  if (!tensor.numel() || !tensor.storage().nbytes()) return made;
  made.begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  made.end = made.begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  made.item_bytes = tensor.itemsize();
  if (tensor.is_non_overlapping_and_dense()) return made;
  for (int64_t i = 0; i < tensor.dim(); i++)
    if (tensor.size(i) > 1 && tensor.stride(i))
      made.dimensions.emplace_back(tensor.size(i), tensor.stride(i) * int64_t(tensor.itemsize()));
  return made;
}

}  // namespace emulated
