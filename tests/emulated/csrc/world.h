// An emulated asynchronous accelerator: its streams, events and memory, without torch's operators.
//
// Each stream is a thread that runs tasks in order. Device memory has two addresses: the one that
// tensors carry, which nobody may touch, and an alias for the tasks. A host that reads a tensor's
// memory directly ends with SIGSEGV, as it would with a real device.
//
// Every task declares the memory that it reads and writes. Vector clocks say whether two tasks are
// ordered by events, whatever the threads do, so that a race is found even if it does no harm.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

// The number of tasks of each stream (by its number) that are known to be over.
using Clock = std::vector<uint64_t>;

// A point of a stream that an event has recorded.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;
  double at_ms = 0;
  Clock clock;

  void reach();
  void wait();
  bool query();
};
using PointPtr = std::shared_ptr<Point>;

struct Stream {
  int number;  // Among the streams of all devices.
  int device;
  int64_t id;  // Among the streams of its device; 0 is the default stream.
  std::mutex mutex;
  std::condition_variable has_work;
  std::deque<std::function<void()>> queue;
  bool is_busy = false;
  uint64_t seed = 0;  // Of its delays.
  std::mt19937_64 delays;
  Clock clock;  // Guarded by the mutex of the clocks.
};

// Memory that a task touches, element by element.
struct Access {
  uintptr_t begin = 0, end = 0;  // Bounds in bytes.
  bool is_write = false;
  size_t item_bytes = 1;
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // Size and stride in bytes, if not dense.

  bool is_dense() const { return dimensions.empty(); }
};

int num_devices();
Stream& stream(int device, int64_t id);
int64_t next_stream(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
int current_device();
int exchange_device(int device);
Stream& current(int device);

// Queues a task that touches no memory.
void push(Stream& stream, std::function<void()> task);
// Queues a task, and checks the memory that it touches against all unordered tasks.
void launch(Stream& stream, const char* name, const std::vector<Access>& accesses, std::function<void()> task);
PointPtr record(Stream& stream);
void wait_in_stream(Stream& stream, const PointPtr& point);
void wait_on_host(const PointPtr& point);
void wait_for_stream(Stream& stream);
void wait_for_device(int device);
// Waits as no program could: neither counted, nor known to the clocks.
void settle(int device);
bool is_idle(Stream& stream);
uint64_t num_launches();
void clear_launches();

// Errors of tasks appear at the next synchronisation.
void fail_later(const std::string& message);

// Synchronisations of the host, by kind and place.
void count_synchronization(const std::string& kind);
std::vector<std::pair<std::string, std::string>> synchronizations();
void clear_synchronizations();
void forbid_synchronizations(bool forbid);

// Device memory.
void* alias_of(const void* address);
void* allocate(size_t bytes, int device, int64_t stream_id);
void deallocate(void* address);
struct Allocated {
  size_t bytes;
  int device;
};
Allocated allocated_at(void* address);
void use_in_stream(void* address, int64_t stream_id);
void release_cached();
struct Statistics {
  int64_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0, limit = 0;
};
Statistics statistics(int device);
void reset_peaks(int device);
void limit_memory(int device, int64_t bytes);
void poison_freed(bool on);

// Unordered accesses, also to memory that was freed and allocated again in between.
void report_hazard(const std::string& text, const std::string& line);
std::vector<std::string> hazards();
void clear_hazards();

// Random delays of tasks, up to so many microseconds each; none if 0.
void delay_tasks(uint64_t seed, int64_t most_us);

// The innermost line of Python that is not torch's, which calls into the device.
std::string python_line();

}  // namespace emulated
