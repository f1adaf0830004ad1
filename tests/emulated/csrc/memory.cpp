// Device memory: a caching allocator per stream, as CUDA's, on memory that the host cannot touch.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <list>
#include <new>
#include <set>
#include <stdexcept>

#include "clocks.h"

namespace emulated {
namespace {

constexpr size_t kArenaBytes = 1ull << 38;  // Addresses only.
constexpr size_t kRounding = 512;           // CUDA's allocator counts multiples of this.
constexpr size_t kPage = 4096;

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Block {
  char* address;
  size_t bytes;
  int device;
  int64_t stream;  // Of the allocation: it may be reused there without a wait.
  size_t used = 0;
  std::set<int64_t> recorded;      // Other streams, as record_stream named them.
  std::vector<PointPtr> awaited;   // Before it may be reused.
  History history;                 // Guarded by the clocks' mutex.
};

struct Memory {
  // The clocks' mutex is always taken first.
  std::mutex mutex;
  int file;
  char *base, *alias;
  size_t end = 0;
  std::map<uintptr_t, Block*> blocks;
  std::map<std::pair<int, int64_t>, std::multimap<size_t, Block*>> cached;
  std::list<Block*> awaiting;
  std::vector<Statistics> statistics;

  // Made when first needed: a process that was forked before has memory of its own.
  Memory() : statistics(num_devices()) {
    file = memfd_create("emulated-device", 0);
    if (file < 0 || ftruncate(file, kArenaBytes)) throw std::runtime_error("emulated device: no memory file");
    auto map = [&](int protection) {
      void* at = mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      if (at == MAP_FAILED) throw std::runtime_error("emulated device: no address space");
      return static_cast<char*>(at);
    };
    base = map(PROT_NONE);
    alias = map(PROT_READ | PROT_WRITE);
  }
};
std::atomic<bool> poisons{false};

Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

void cache(Block* block) { memory().cached[{block->device, block->stream}].emplace(block->bytes, block); }

// NaN in every format of floating-point numbers.
void poison(Block* block) { std::memset(alias_of(block->address), 0xFF, block->bytes); }

// Under both mutexes.
void collect() {
  auto& list = memory().awaiting;
  for (auto it = list.begin(); it != list.end();) {
    Block* block = *it;
    bool is_over = std::all_of(block->awaited.begin(), block->awaited.end(), [](auto& point) { return point->query(); });
    if (!is_over) {
      ++it;
      continue;
    }
    block->awaited.clear();
    block->history.touched.clear();
    if (poisons) poison(block);
    cache(block);
    it = list.erase(it);
  }
}

// Under both mutexes; the device must be idle.
void release_all() {
  auto& own = memory();
  collect();
  for (auto& [place, blocks] : own.cached) {
    for (auto& [bytes, block] : blocks) {
      fallocate(own.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->address - own.base, rounded(bytes, kPage));
      own.statistics[block->device].reserved -= bytes;
      own.blocks.erase(reinterpret_cast<uintptr_t>(block->address));
      delete block;
    }
    blocks.clear();
  }
}

}  // namespace

void* alias_of(const void* address) {
  auto& own = memory();
  return own.alias + (static_cast<const char*>(address) - own.base);
}

History* history_at(uintptr_t address) {
  auto& own = memory();
  std::lock_guard<std::mutex> lock(own.mutex);
  auto after = own.blocks.upper_bound(address);
  if (after == own.blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  bool is_inside = address < reinterpret_cast<uintptr_t>(block->address) + block->bytes;
  return is_inside ? &block->history : nullptr;
}

void* allocate(size_t bytes, int device, int64_t stream_id) {
  if (!bytes) return nullptr;
  auto& own = memory();
  size_t needed = rounded(bytes, kRounding);
  auto& numbers = own.statistics.at(device);
  for (bool is_retry : {false, true}) {
    std::lock_guard<std::mutex> first(clocks_mutex());
    std::lock_guard<std::mutex> second(own.mutex);
    collect();
    auto& blocks = own.cached[{device, stream_id}];
    auto it = blocks.lower_bound(needed);
    Block* block = nullptr;
    if (it != blocks.end() && it->first <= 2 * needed) {
      block = it->second;
      blocks.erase(it);
    } else if (numbers.limit && numbers.reserved + int64_t(needed) > numbers.limit) {
      if (is_retry) break;
    } else {
      block = new Block{own.base + own.end, needed, device, stream_id};
      own.end += rounded(needed, kPage) + kPage;  // A page between blocks stays unused.
      own.blocks[reinterpret_cast<uintptr_t>(block->address)] = block;
      numbers.reserved += needed;
      numbers.peak_reserved = std::max(numbers.peak_reserved, numbers.reserved);
    }
    if (block) {
      block->history.generation++;
      block->recorded.clear();
      block->used = needed;
      numbers.allocated += needed;
      numbers.peak_allocated = std::max(numbers.peak_allocated, numbers.allocated);
      return block->address;
    }
    release_all();
  }
  throw std::bad_alloc();
}

void deallocate(void* address) {
  if (!address) return;
  auto& own = memory();
  std::lock_guard<std::mutex> first(clocks_mutex());
  std::lock_guard<std::mutex> second(own.mutex);
  Block* block = own.blocks.at(reinterpret_cast<uintptr_t>(address));
  own.statistics[block->device].allocated -= block->used;
  if (block->recorded.empty()) {
    if (poisons) push(stream(block->device, block->stream), [block] { poison(block); });
    cache(block);
    return;
  }
  for (int64_t id : block->recorded) {
    auto point = std::make_shared<Point>();
    push(stream(block->device, id), [point] { point->reach(); });
    block->awaited.push_back(point);
  }
  own.awaiting.push_back(block);
}

Allocated allocated_at(void* address) {
  auto& own = memory();
  std::lock_guard<std::mutex> lock(own.mutex);
  Block* block = own.blocks.at(reinterpret_cast<uintptr_t>(address));
  return {block->used, block->device};
}

void use_in_stream(void* address, int64_t stream_id) {
  auto& own = memory();
  std::lock_guard<std::mutex> lock(own.mutex);
  auto it = own.blocks.find(reinterpret_cast<uintptr_t>(address));
  if (it != own.blocks.end() && it->second->stream != stream_id) it->second->recorded.insert(stream_id);
}

void release_cached() {
  for (int device = 0; device < num_devices(); device++) wait_for_device(device);
  std::lock_guard<std::mutex> first(clocks_mutex());
  std::lock_guard<std::mutex> second(memory().mutex);
  release_all();
}

Statistics statistics(int device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().statistics.at(device);
}

void reset_peaks(int device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto& numbers = memory().statistics.at(device);
  numbers.peak_allocated = numbers.allocated;
  numbers.peak_reserved = numbers.reserved;
}

void limit_memory(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().statistics.at(device).limit = bytes;
}

void poison_freed(bool on) { poisons = on; }

}  // namespace emulated
