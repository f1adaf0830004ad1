// Streams, events, vector clocks, and the host's synchronisations with them.
#include <Python.h>

#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "clocks.h"
#include "trace.h"

namespace emulated {
namespace {

constexpr int64_t kPooledStreams = 32;  // As many as CUDA hands out before it starts again.

struct Streams {
  std::mutex mutex;
  std::vector<std::vector<Stream*>> by_device;
  std::vector<int64_t> handed_out;
  int count = 0;
  std::atomic<uint64_t> launches{0};
  pid_t process = getpid();

  Streams() : by_device(num_devices()), handed_out(num_devices(), 0) {}
};

std::atomic<uint64_t> delay_seed{0};
std::atomic<int64_t> most_delay_us{0};

// Never destroyed: the threads of the streams are detached.
Streams& streams() {
  static auto* all = new Streams;
  if (all->process != getpid()) throw std::runtime_error("emulated device: cannot be used in a forked process");
  return *all;
}

struct Failures {
  std::mutex mutex;
  std::string first;
};
Failures& failures() {
  static auto* all = new Failures;
  return *all;
}

struct Synchronizations {
  std::mutex mutex;
  std::vector<std::pair<std::string, std::string>> all;
  std::atomic<bool> are_forbidden{false};
};
Synchronizations& counted() {
  static auto* all = new Synchronizations;
  return *all;
}

thread_local int tls_device = 0;
thread_local std::vector<int64_t> tls_streams;

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void run(Stream* stream) {
  c10::InferenceMode on;  // Takes tensors of both modes, in place too.
  at::DisableRecordFunctionGuard unseen;  // A profiler shows tasks, not the CPU's kernels in them.
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->is_busy = false;
      stream->has_work.wait(lock, [&] { return !stream->queue.empty(); });
      task = std::move(stream->queue.front());
      stream->queue.pop_front();
      stream->is_busy = true;
    }
    if (int64_t most = most_delay_us) {
      // Most tasks start at once; a few wait long enough to be overtaken by many of other streams.
      if (stream->seed != delay_seed) {
        stream->seed = delay_seed;
        stream->delays.seed(delay_seed * 1000003 + stream->number);
      }
      uint64_t drawn = stream->delays();
      if (drawn % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds((drawn >> 8) % most));
    }
    try {
      task();
    } catch (const std::exception& error) {
      fail_later(error.what());
    }
  }
}

void throw_failure() {
  auto& all = failures();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.first.empty()) return;
  std::string first;
  first.swap(all.first);
  throw std::runtime_error("emulated device: asynchronous error: " + first);
}

}  // namespace

void Point::reach() {
  std::lock_guard<std::mutex> lock(mutex);
  is_over = true;
  at_ms = now_ms();
  changed.notify_all();
}

void Point::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return is_over; });
}

bool Point::query() {
  std::lock_guard<std::mutex> lock(mutex);
  return is_over;
}

int num_devices() {
  static int number = [] {
    const char* value = std::getenv("EMULATED_DEVICES");
    return value ? std::atoi(value) : 4;
  }();
  return number;
}

Stream& stream(int device, int64_t id) {
  auto& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& list = all.by_device.at(device);
  // Threads are started when first needed, so that a process that never uses the device can fork.
  while (int64_t(list.size()) <= id) {
    auto* made = new Stream;
    made->number = all.count++;
    made->device = device;
    made->id = int64_t(list.size());
    list.push_back(made);
    std::thread(run, made).detach();
  }
  return *list[id];
}

int64_t next_stream(int device) {
  auto& all = streams();
  int64_t id;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    id = 1 + all.handed_out.at(device)++ % kPooledStreams;
  }
  stream(device, id);
  return id;
}

int64_t current_stream(int device) { return size_t(device) < tls_streams.size() ? tls_streams[device] : 0; }

int64_t exchange_stream(int device, int64_t id) {
  if (tls_streams.size() <= size_t(device)) tls_streams.resize(device + 1, 0);
  std::swap(tls_streams[device], id);
  return id;
}

int current_device() { return tls_device; }

int exchange_device(int device) {
  std::swap(tls_device, device);
  return device;
}

Stream& current(int device) { return stream(device, current_stream(device)); }

void push(Stream& stream, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(stream.mutex);
  stream.queue.push_back(std::move(task));
  stream.has_work.notify_one();
}

void launch(Stream& stream, const char* name, const std::vector<Access>& accesses, std::function<void()> task) {
  streams().launches++;
  note_accesses(stream, name, accesses);
  push(stream, traced(stream, name, std::move(task)));
}

PointPtr record(Stream& stream) {
  auto point = std::make_shared<Point>();
  point->clock = clock_of(stream);
  push(stream, [point] { point->reach(); });
  return point;
}

void wait_in_stream(Stream& stream, const PointPtr& point) {
  join_clock(stream, point->clock);
  push(stream, [point] { point->wait(); });
}

void wait_on_host(const PointPtr& point) {
  point->wait();
  join_host_clock(point->clock);
  throw_failure();
}

void wait_for_stream(Stream& stream) { wait_on_host(record(stream)); }

namespace {
std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  return streams().by_device.at(device);
}
}  // namespace

void wait_for_device(int device) {
  for (auto* each : streams_of(device)) wait_for_stream(*each);
}

void settle(int device) {
  for (auto* each : streams_of(device)) record(*each)->wait();
}

bool is_idle(Stream& stream) {
  std::lock_guard<std::mutex> lock(stream.mutex);
  return stream.queue.empty() && !stream.is_busy;
}

uint64_t num_launches() { return streams().launches; }
void clear_launches() { streams().launches = 0; }

void fail_later(const std::string& message) {
  auto& all = failures();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.first.empty()) all.first = message;
}

void count_synchronization(const std::string& kind) {
  auto& all = counted();
  std::string line = python_line();
  if (all.are_forbidden) {
    throw std::runtime_error("emulated device: the host must not wait here: " + kind + " in " + line);
  }
  std::lock_guard<std::mutex> lock(all.mutex);
  all.all.emplace_back(kind, line);
}

std::vector<std::pair<std::string, std::string>> synchronizations() {
  std::lock_guard<std::mutex> lock(counted().mutex);
  return counted().all;
}

void clear_synchronizations() {
  std::lock_guard<std::mutex> lock(counted().mutex);
  counted().all.clear();
}

void forbid_synchronizations(bool forbid) { counted().are_forbidden = forbid; }

void delay_tasks(uint64_t seed, int64_t most_us) {
  // Streams that are started later take the seed then.
  delay_seed = seed;
  most_delay_us = most_us;
}

std::string python_line() {
  if (!Py_IsInitialized()) return "";
  PyGILState_STATE state = PyGILState_Ensure();
  std::string found = "a thread of C++";
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* path = PyUnicode_AsUTF8(code->co_filename);
    std::string file = path ? path : "";
    found = file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    if (file.find("/torch/") == std::string::npos && file.find("<frozen") == std::string::npos) break;
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyErr_Clear();
  PyGILState_Release(state);
  return found;
}

}  // namespace emulated
