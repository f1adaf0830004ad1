// Vector clocks of streams and of the host, and what streams have touched.
#pragma once

#include "world.h"

namespace emulated {

Clock clock_of(Stream& stream);
void join_clock(Stream& stream, const Clock& clock);
void join_host_clock(const Clock& clock);

// Checks the accesses of the next task of a stream, and remembers them.
void note_accesses(Stream& stream, const char* name, const std::vector<Access>& accesses);

// What has been touched in one block of memory.
struct Touched {
  Access access;
  int stream;
  uint64_t tick;
  uint64_t generation;
  const char* name;
};
struct History {
  uint64_t generation = 0;  // How often the block was allocated.
  std::vector<Touched> touched;
};

std::mutex& clocks_mutex();

// The history of the block that holds an address, or null; under the mutex.
History* history_at(uintptr_t address);

}  // namespace emulated
