// The process group of the emulated device, and what Python sees of it.
#pragma once

#include <pybind11/pybind11.h>

namespace emulated {

// Also binds the generators, whose type is one of torch's.
void bind_group(pybind11::module_& module);

}  // namespace emulated
