// What torch's profiler records of the device.
#pragma once

#include "world.h"

namespace emulated {

// Returns a task that a trace will show in its stream, if one is being recorded; else the same task.
std::function<void()> traced(const Stream& stream, const char* name, std::function<void()> task);

}  // namespace emulated
