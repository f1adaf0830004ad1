// The race detector: two accesses to the same bytes, one of them a write, must be ordered by events.
#include "clocks.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

namespace emulated {
namespace {

constexpr size_t kMostTouched = 512;

struct Hazards {
  Clock host;  // What the host has waited for. One for all its threads.
  std::vector<std::string> found;
  std::set<std::string> seen;
};
Hazards& all() {
  static auto* made = new Hazards;
  return *made;
}

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

uint64_t known(const Clock& clock, int stream) { return size_t(stream) < clock.size() ? clock[stream] : 0; }

template <typename F>
void each_element(const Access& access, F&& visit) {
  std::function<void(size_t, uintptr_t)> walk = [&](size_t dimension, uintptr_t address) {
    if (dimension == access.dimensions.size()) {
      visit(address);
      return;
    }
    auto [size, stride] = access.dimensions[dimension];
    for (int64_t i = 0; i < size; i++) walk(dimension + 1, address + i * stride);
  };
  walk(0, access.begin);
}

// Exact also for views with strides, of which bounds say little: columns of a matrix do not overlap.
bool overlap(const Access& one, const Access& other) {
  uintptr_t begin = std::max(one.begin, other.begin), end = std::min(one.end, other.end);
  if (begin >= end) return false;
  if (one.is_dense() && other.is_dense()) return true;
  std::vector<bool> marked(end - begin, one.is_dense());
  if (!one.is_dense()) {
    each_element(one, [&](uintptr_t address) {
      for (size_t i = 0; i < one.item_bytes; i++)
        if (address + i >= begin && address + i < end) marked[address + i - begin] = true;
    });
  }
  if (other.is_dense()) return std::find(marked.begin(), marked.end(), true) != marked.end();
  bool found = false;
  each_element(other, [&](uintptr_t address) {
    for (size_t i = 0; i < other.item_bytes && !found; i++)
      found = address + i >= begin && address + i < end && marked[address + i - begin];
  });
  return found;
}

void check(Stream& stream, uint64_t tick, const char* name, const Access& access, std::vector<std::string>& found) {
  History* history = history_at(access.begin);
  if (!history) return;
  auto& touched = history->touched;
  std::vector<Touched> kept;
  kept.reserve(touched.size() + 1);
  for (auto& before : touched) {
    bool conflicts = before.stream != stream.number && (access.is_write || before.access.is_write) &&
                     known(stream.clock, before.stream) < before.tick && overlap(access, before.access);
    if (conflicts) {
      std::ostringstream text;
      text << (before.generation == history->generation ? "race: " : "reused memory: ")
           << (access.is_write ? "write by " : "read by ") << name << " in stream " << stream.number
           << " is not ordered after " << (before.access.is_write ? "write by " : "read by ") << before.name
           << " in stream " << before.stream;
      text << ", " << access.end - access.begin << " bytes";
      found.push_back(text.str());
    }
    // Later accesses that are ordered after this one are ordered after what it covers.
    bool is_covered = access.is_dense() && access.begin <= before.access.begin && before.access.end <= access.end &&
                      (access.is_write || (!before.access.is_write && before.stream == stream.number));
    if (!is_covered) kept.push_back(before);
  }
  kept.push_back({access, stream.number, tick, history->generation, name});
  if (kept.size() > kMostTouched) kept.erase(kept.begin(), kept.begin() + kMostTouched / 4);
  touched.swap(kept);
}

}  // namespace

std::mutex& clocks_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

Clock clock_of(Stream& stream) {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  join(stream.clock, all().host);
  return stream.clock;
}

void join_clock(Stream& stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  join(stream.clock, clock);
}

void join_host_clock(const Clock& clock) {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  join(all().host, clock);
}

void note_accesses(Stream& stream, const char* name, const std::vector<Access>& accesses) {
  std::vector<std::string> found;
  {
    std::lock_guard<std::mutex> lock(clocks_mutex());
    join(stream.clock, all().host);
    if (stream.clock.size() <= size_t(stream.number)) stream.clock.resize(stream.number + 1);
    uint64_t tick = ++stream.clock[stream.number];
    for (auto& access : accesses)
      if (access.begin < access.end) check(stream, tick, name, access, found);
  }
  for (auto& text : found) report_hazard(text, python_line());
}

// Callers must not hold the mutex: to find the line takes Python's lock, whose holder may want it.
void report_hazard(const std::string& text, const std::string& line) {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  if (!all().seen.insert(text).second) return;
  all().found.push_back(text + ", in " + line);
  // For tests of commands, which cannot ask a process that has ended.
  if (const char* file = std::getenv("EMULATED_HAZARDS_FILE"))
    std::ofstream(file, std::ios::app) << all().found.back() << std::endl;
}

std::vector<std::string> hazards() {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  return all().found;
}

void clear_hazards() {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  all().found.clear();
  all().seen.clear();
}

}  // namespace emulated
