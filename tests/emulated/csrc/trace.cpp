// Device activities for torch's profiler, as a child profiler of Kineto.
//
// A task is noted in its stream's thread, and linked with the operator that launched it. torch waits
// for the device before it stops a profiler, so that nothing here waits.
#include "trace.h"

// torch does not export the functions of fmt that Kineto's headers call.
#define FMT_HEADER_ONLY
#include <kineto/libkineto.h>

#include <chrono>
#include <set>

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
  uint64_t operation;
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

thread_local std::vector<uint64_t> operations;  // The operators that this thread is in.

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
    for (auto& each : own_->tasks) {
      const auto* operation = linked(int32_t(each.operation));
      auto& launch = add("emulatedLaunch", ActivityType::PRIVATEUSE1_RUNTIME, each, operation);
      launch.device = libkineto::processId();
      launch.resource = launch.threadId = each.thread;
      launch.startTime = each.launched_ns;
      launch.endTime = each.launched_ns + 1000;
      launch.flow.start = true;
      launch.log(logger);
      auto& task = add(each.name, kCopies.count(each.name) ? ActivityType::GPU_MEMCPY : ActivityType::CONCURRENT_KERNEL, each, operation);
      task.device = each.device;
      task.resource = int32_t(each.stream);
      task.startTime = each.began_ns;
      task.endTime = each.ended_ns;
      task.addMetadata("stream", each.stream);
      task.log(logger);
    }
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }
  void pushCorrelationId(uint64_t id) override { operations.push_back(id); }
  void popCorrelationId() override {
    if (!operations.empty()) operations.pop_back();
  }

 private:
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
  std::set<ActivityType> types_{ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY, ActivityType::PRIVATEUSE1_RUNTIME};
};

bool is_registered = [] {
  libkineto::api().registerProfilerFactory([] { return std::make_unique<Profiler>(); });
  return true;
}();

}  // namespace

std::function<void()> traced(const Stream& stream, const char* name, std::function<void()> task) {
  auto own = current_recording();
  if (!own) return task;
  Noted noted{name_in_trace(name), stream.device, stream.id, 0, libkineto::systemThreadId(), operations.empty() ? 0 : operations.back(), now_ns()};
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
