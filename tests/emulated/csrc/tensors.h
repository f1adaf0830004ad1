// Between torch's tensors and the world of streams and memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>

#include "world.h"

namespace emulated {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Stream torch_stream(int device, int64_t id);
Stream& stream_of(const c10::Stream& stream);
Stream& current(const c10::Device& device);

// Makes the numbers of a tensor be read as those of another: conjugated, negated, or as a number of
// Python, which does not determine a result's dtype.
const at::Tensor& read_alike(const at::Tensor& made, const at::Tensor& original);
// A tensor on the host's alias of a device tensor's memory, for tasks.
at::Tensor host_alias(const at::Tensor& tensor);
Access access(const at::Tensor& tensor, bool is_write);
void resize_storage(const c10::Storage& storage, size_t bytes);

at::Generator& default_generator(int device);
void seed_generators(uint64_t seed);
at::HostAllocator& pinned_allocator();

}  // namespace emulated
