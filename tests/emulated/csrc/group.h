// The process group of the emulated device.
#pragma once

#include <torch/extension.h>

namespace emulated {

void bind_group(pybind11::module_& module);

}  // namespace emulated
