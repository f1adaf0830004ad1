// Device activities for torch's profiler, as a child profiler of Kineto.
//
// A task is noted in its stream's thread, and linked with the operator that launched it. A named range
// of the host lasts on each stream from the first to the last task that was launched while it was the
// innermost range of its thread, as in traces of CUDA. torch waits for the device before it stops a
// profiler, so that nothing here waits.
#include "trace.h"

// torch does not export the functions of fmt that Kineto's headers call.
#define FMT_HEADER_ONLY
#include <kineto/libkineto.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <tuple>

namespace emulated {
namespace {

using libkineto::ActivityType;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

struct Noted {
  std::string name;
  int device;
  int64_t stream;
  int32_t launch;  // Its number.
  int32_t thread;  // That launched it.
  uint64_t operation, range;  // That it was launched in.
  int64_t launched_ns, began_ns = 0, ended_ns = 0;
};

struct Recording {
  std::mutex mutex;
  std::vector<Noted> tasks;
  int32_t launches = 0;
};

std::mutex recording_mutex;
std::shared_ptr<Recording> recording;  // Null between traces. Under its mutex.

std::shared_ptr<Recording> current_recording() {
  std::lock_guard<std::mutex> lock(recording_mutex);
  return recording;
}

// Copies of tensors and of memory, and of a number to the host.
const std::set<std::string> kCopies = {"copy_", "copy_data", "item"};

// Collectives are those without the namespace of an operator. They get a name that tools take for
// that of one of NCCL's kernels.
std::string name_in_trace(const std::string& name) {
  bool is_collective = name.find("::") == std::string::npos && !kCopies.count(name);
  return is_collective ? "nccl:" + name : name;
}

using Numbers = std::vector<uint64_t>;
thread_local Numbers operations, ranges;  // The operators and named ranges that this thread is in.

uint64_t innermost(const Numbers& open) { return open.empty() ? 0 : open.back(); }
void leave(Numbers& open) {
  if (!open.empty()) open.pop_back();
}

struct Session final : libkineto::IActivityProfilerSession {
  void start() override {
    own_ = std::make_shared<Recording>();
    std::lock_guard<std::mutex> lock(recording_mutex);
    recording = own_;
  }
  void stop() override {
    std::lock_guard<std::mutex> lock(recording_mutex);
    recording = nullptr;
  }
  std::vector<std::string> errors() override { return {}; }
  void processTrace(libkineto::ActivityLogger&) override {}
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t, int64_t) override {
    std::lock_guard<std::mutex> lock(own_->mutex);
    std::map<std::tuple<uint64_t, int, int64_t>, libkineto::GenericTraceActivity*> on_device;
    for (auto& each : own_->tasks) {
      if (const auto* range = linked(int32_t(each.range))) {
        auto& lasting = on_device[{each.range, each.device, each.stream}];
        if (!lasting) lasting = &add(range->name(), ActivityType::GPU_USER_ANNOTATION, each, nullptr);
        place(*lasting, each, lasting->startTime ? std::min(lasting->startTime, each.began_ns) : each.began_ns,
              std::max(lasting->endTime, each.ended_ns));
      }
      const auto* operation = linked(int32_t(each.operation));
      auto& launch = add("emulatedLaunch", ActivityType::PRIVATEUSE1_RUNTIME, each, operation);
      launch.device = libkineto::processId();
      launch.resource = launch.threadId = each.thread;
      launch.startTime = each.launched_ns;
      launch.endTime = each.launched_ns + 1000;
      launch.flow.start = true;
      launch.log(logger);
      auto& task = add(each.name, kCopies.count(each.name) ? ActivityType::GPU_MEMCPY : ActivityType::CONCURRENT_KERNEL, each, operation);
      place(task, each, each.began_ns, each.ended_ns);
      task.addMetadata("stream", each.stream);
      task.log(logger);
    }
    for (auto& [_, range] : on_device) range->log(logger);
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }
  void pushCorrelationId(uint64_t id) override { operations.push_back(id); }
  void popCorrelationId() override { leave(operations); }
  void pushUserCorrelationId(uint64_t id) override { ranges.push_back(id); }
  void popUserCorrelationId() override { leave(ranges); }

 private:
  static void place(libkineto::GenericTraceActivity& made, const Noted& noted, int64_t start, int64_t end) {
    made.device = noted.device;
    made.resource = int32_t(noted.stream);
    made.startTime = start;
    made.endTime = end;
  }

  libkineto::GenericTraceActivity& add(const std::string& name, ActivityType type, const Noted& noted,
                                       const libkineto::ITraceActivity* operation) {
    buffer_->emplace_activity(buffer_->span, type, name);
    auto& made = *buffer_->activities.back();
    made.id = noted.launch;
    made.flow.id = noted.launch;
    made.flow.type = libkineto::kLinkAsyncCpuGpu;
    made.linked = operation;
    made.addMetadata("correlation", noted.launch);
    made.addMetadata("External id", noted.operation);
    return made;
  }

  std::shared_ptr<Recording> own_ = std::make_shared<Recording>();
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
};

struct Profiler final : libkineto::IActivityProfiler {
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return types_; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(const std::set<ActivityType>& asked,
                                                                 const libkineto::Config&) override {
    if (!asked.count(ActivityType::PRIVATEUSE1_RUNTIME)) return nullptr;
    return std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(int64_t, int64_t, const std::set<ActivityType>& asked,
                                                                 const libkineto::Config& config) override {
    return configure(asked, config);
  }

 private:
  std::string name_ = "emulated";
  std::set<ActivityType> types_{ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY, ActivityType::GPU_USER_ANNOTATION,
                                ActivityType::PRIVATEUSE1_RUNTIME};
};

bool is_registered = [] {
  libkineto::api().registerProfilerFactory([] { return std::make_unique<Profiler>(); });
  return true;
}();

}  // namespace

std::function<void()> traced(const Stream& stream, const char* name, std::function<void()> task) {
  auto own = current_recording();
  if (!own) return task;
  Noted noted{name_in_trace(name), stream.device, stream.id, 0, libkineto::systemThreadId(), innermost(operations), innermost(ranges), now_ns()};
  {
    std::lock_guard<std::mutex> lock(own->mutex);
    noted.launch = ++own->launches;
  }
  return [own, noted, task = std::move(task)]() mutable {
    noted.began_ns = now_ns();
    task();
    noted.ended_ns = now_ns();
    std::lock_guard<std::mutex> lock(own->mutex);
    own->tasks.push_back(noted);
  };
}

}  // namespace emulated
