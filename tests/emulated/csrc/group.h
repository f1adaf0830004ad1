// The process group of the emulated device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emulated {

// Takes a gloo backend of the same ranks, which moves the bytes.
c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size);

}  // namespace emulated
