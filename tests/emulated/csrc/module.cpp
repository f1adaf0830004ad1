// What Python sees of the emulated device.
// torch's own bindings take half a minute to compile: what needs them stands in group.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "group.h"
#include "world.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  emulated::bind_group(m);
  m.def("num_devices", &emulated::num_devices);
  m.def("synchronizations", &emulated::synchronizations);
  m.def("clear_synchronizations", &emulated::clear_synchronizations);
  m.def("forbid_synchronizations", &emulated::forbid_synchronizations);
  m.def("hazards", &emulated::hazards);
  m.def("clear_hazards", &emulated::clear_hazards);
  m.def("num_launches", &emulated::num_launches);
  m.def("clear_launches", &emulated::clear_launches);
  m.def("delay_tasks", &emulated::delay_tasks);
  m.def("poison_freed", &emulated::poison_freed);
  m.def("limit_memory", &emulated::limit_memory);
  m.def("memory", [](int device) {
    auto numbers = emulated::statistics(device);
    return std::map<std::string, int64_t>{{"allocated", numbers.allocated},
                                          {"peak_allocated", numbers.peak_allocated},
                                          {"reserved", numbers.reserved},
                                          {"peak_reserved", numbers.peak_reserved}};
  });
}
