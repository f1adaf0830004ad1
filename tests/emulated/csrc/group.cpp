// A process group with NCCL's semantics: gloo's collectives, in a communication stream.
#include "group.h"

#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include <algorithm>

#include "communicator.h"
#include "tensors.h"

namespace emulated {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// wait() makes the current stream wait, and returns at once: it raises an error only if that is known
// already. A barrier blocks the host, and so does a wait with a limit.
struct CollectiveWork final : c10d::Work {
  CollectiveWork(c10d::OpType operation, Tensors outputs, Tensors used, FlightPtr flight, c10::Stream communication, bool blocks)
      : Work(-1, operation),
        outputs_(std::move(outputs)),
        used_(std::move(used)),
        flight_(std::move(flight)),
        communication_(communication),
        blocks_(blocks) {
    // Complete at once: its events, recorded in the communication stream, order who uses its value.
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                       std::vector<c10::Device>{communication_.device()});
    c10::StreamGuard guard(communication_);
    future_->markCompleted(c10::IValue(outputs_));
  }
  // Never waited for: the memory must last until the collective is over.
  ~CollectiveWork() override {
    for (auto& each : used_) use_in_stream(each.storage().data_ptr().get_context(), communication_.id());
  }
  bool isCompleted() override { return flight_->error() || flight_->end->query(); }
  bool isSuccess() const override { return !flight_->error() && flight_->end->query(); }
  std::exception_ptr exception() const override { return flight_->error(); }
  Tensors result() override { return outputs_; }
  void synchronize() override {
    wait_in_stream(current(communication_.device()), flight_->end);
    used_.clear();
  }
  bool wait(std::chrono::milliseconds limit) override {
    synchronize();
    if (limit != kNoTimeout) {
      count_synchronization("wait with a limit");
      flight_->wait_on_host(limit);
    } else if (blocks_ && !isCompleted()) {
      count_synchronization("barrier");
      emulated::wait_on_host(flight_->end);
    }
    if (auto error = flight_->error()) {
      flight_->communicator->abort("an error was raised by wait()");
      std::rethrow_exception(error);
    }
    return true;
  }
  void abort() override { flight_->communicator->abort("a collective was aborted"); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  Tensors outputs_, used_;
  FlightPtr flight_;
  c10::Stream communication_;
  bool blocks_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors aliases(const Tensors& tensors) {
  Tensors made;
  for (auto& each : tensors) made.push_back(host_alias(each));
  return made;
}

// gloo's collectives on the host's memory, for what gloo itself lacks.
struct Gloo {
  std::shared_ptr<Communicator> communicator;
  c10::intrusive_ptr<c10d::Backend> backend;
  int rank, size;

  static bool takes_mean(c10d::ReduceOp& operation) {
    if (operation != c10d::ReduceOp::AVG) return false;
    operation = c10d::ReduceOp::SUM;
    return true;
  }
  void all_reduce(Tensors tensors, c10d::ReduceOp operation) const {
    bool mean = takes_mean(operation);
    for (auto& each : tensors) {
      Tensors one{each};
      c10d::AllreduceOptions options;
      options.reduceOp = operation;
      communicator->finish(backend->allreduce(one, options));
      if (mean) each.div_(size);
    }
  }
  void all_gather(const Tensor& whole, const Tensor& own) const {
    auto rows = whole.view({size, -1});
    std::vector<Tensors> received(1);
    for (int i = 0; i < size; i++) received[0].push_back(at::empty_like(rows[i]));
    Tensors sent{own.clone().view(-1)};
    communicator->finish(backend->allgather(received, sent, {}));
    for (int i = 0; i < size; i++) rows[i].copy_(received[0][i]);
  }
  void reduce_scatter(const Tensor& own, const Tensor& whole, c10d::ReduceOp operation) const {
    Tensor sum = whole.clone();
    all_reduce({sum}, operation);
    own.copy_(sum.view({size, -1})[rank].view(own.sizes()));
  }
};

constexpr auto kGlooTimeout = std::chrono::hours(24);

// Makes the gloo backend that moves a group's bytes.
using MakeGloo = std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>&, int, int,
                                                                 std::chrono::milliseconds)>;

struct GroupOptions final : c10d::Backend::Options {
  explicit GroupOptions(std::chrono::milliseconds timeout) : Options("emulated", timeout) {}
};

struct Group final : c10d::Backend {
  Group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout, MakeGloo make_gloo)
      : Backend(rank, size),
        options(c10::make_intrusive<GroupOptions>(timeout)),
        gloo_{nullptr, make_gloo(store, rank, size, timeout), rank, size},
        make_gloo_(std::move(make_gloo)) {
    gloo_.communicator = std::make_shared<Communicator>(rank, gloo_.backend);
    gloo_.backend->setTimeout(kGlooTimeout);  // The watchdog's limit counts, not gloo's.
  }

  c10::intrusive_ptr<GroupOptions> options;

  const std::string getBackendName() const override { return "emulated"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& own) override {
    auto it = std::find(ranks.begin(), ranks.end(), rank_);
    if (it == ranks.end()) return nullptr;
    return c10::make_intrusive<Group>(store, int(it - ranks.begin()), int(ranks.size()), own->timeout, make_gloo_);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout; }
  void abort() override { gloo_.communicator->abort("abort() was called"); }
  // Waits for what is in flight, as long as that takes.
  void shutdown() override {
    if (!gloo_.communicator->is_aborted()) wait_for_flights(*gloo_.communicator);
    gloo_.communicator->abort("shutdown() was called");
  }

  void startCoalescing() override { open_.emplace(); }
  WorkPtr endCoalescing() override {
    Open all = std::move(*open_);
    open_.reset();
    return start(c10d::OpType::COALESCED, "coalesced", all.reads, all.writes, all.writes, [communicator = gloo_.communicator, runs = all.runs] {
      // Sends and receives of one group may wait for each other.
      std::vector<WorkPtr> works;
      for (auto& run : runs)
        if (auto work = run()) works.push_back(work);
      for (auto& work : works) communicator->finish(work);
      return WorkPtr();
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    bool is_root = options.rootRank == rank_;
    return start(c10d::OpType::BROADCAST, "broadcast", is_root ? tensors : Tensors{}, is_root ? Tensors{} : tensors, tensors,
                 [g = gloo_, a = aliases(tensors), options]() mutable { return g.backend->broadcast(a, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return all_reduce(c10d::OpType::ALLREDUCE, "all_reduce", tensors, options.reduceOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return all_reduce(c10d::OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors, options.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return start(c10d::OpType::REDUCE, "reduce", {}, tensors, tensors, [g = gloo_, a = aliases(tensors), options]() mutable {
      auto own = options;
      bool mean = Gloo::takes_mean(own.reduceOp);
      g.communicator->finish(g.backend->reduce(a, own));
      if (mean) a[0].div_(g.size);
      return WorkPtr();
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return start(c10d::OpType::ALLGATHER, "all_gather", inputs, outputs[0], outputs[0],
                 [g = gloo_, a = aliases(outputs[0]), own = host_alias(inputs[0])]() mutable {
                   for (int root = 0; root < g.size; root++) {  // Lengths may differ, as with NCCL.
                     if (root == g.rank && a[root].data_ptr() != own.data_ptr()) a[root].copy_(own);
                     if (!a[root].numel()) continue;
                     c10d::BroadcastOptions options;
                     options.rootRank = root;
                     Tensors one{a[root]};
                     g.communicator->finish(g.backend->broadcast(one, options));
                   }
                   return WorkPtr();
                 });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return start(c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {input}, {output}, {output},
                 [g = gloo_, a = host_alias(output), b = host_alias(input)] {
                   g.all_gather(a, b);
                   return WorkPtr();
                 });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return start(c10d::OpType::COALESCED, "all_gather_into_tensor_coalesced", inputs, outputs, outputs,
                 [g = gloo_, a = aliases(outputs), b = aliases(inputs)] {
                   for (size_t i = 0; i < a.size(); i++) g.all_gather(a[i], b[i]);
                   return WorkPtr();
                 });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {input}, {output}, {output},
                 [g = gloo_, a = host_alias(output), b = host_alias(input), operation = options.reduceOp] {
                   g.reduce_scatter(a, b, operation);
                   return WorkPtr();
                 });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return start(c10d::OpType::COALESCED, "reduce_scatter_tensor_coalesced", inputs, outputs, outputs,
                 [g = gloo_, a = aliases(outputs), b = aliases(inputs), operation = options.reduceOp] {
                   for (size_t i = 0; i < a.size(); i++) g.reduce_scatter(a[i], b[i], operation);
                   return WorkPtr();
                 });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return start(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", inputs[0], outputs, outputs,
                 [g = gloo_, own = host_alias(outputs[0]), a = aliases(inputs[0]), operation = options.reduceOp] {
                   for (int i = 0; i < g.size; i++) {
                     Tensor sum = a[i].clone();
                     g.all_reduce({sum}, operation);
                     if (i == g.rank) own.copy_(sum);
                   }
                   return WorkPtr();
                 });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& received, std::vector<int64_t>& sent,
                        const c10d::AllToAllOptions& options) override {
    return start(c10d::OpType::ALLTOALL_BASE, "all_to_all_single", {input}, {output}, {output},
                 [g = gloo_, a = host_alias(output), b = host_alias(input), received, sent, options]() mutable {
                   return g.backend->alltoall_base(a, b, received, sent, options);
                 });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors writes = outputs.empty() ? Tensors{} : outputs[0];
    return start(c10d::OpType::GATHER, "gather", inputs, writes, writes,
                 [g = gloo_, a = aliases(writes), b = aliases(inputs), options, is_root = !outputs.empty()]() mutable {
                   std::vector<Tensors> lists;
                   if (is_root) lists.push_back(a);
                   return g.backend->gather(lists, b, options);
                 });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors reads = inputs.empty() ? Tensors{} : inputs[0];
    return start(c10d::OpType::SCATTER, "scatter", reads, outputs, outputs,
                 [g = gloo_, a = aliases(outputs), b = aliases(reads), options, is_root = !inputs.empty()]() mutable {
                   std::vector<Tensors> lists;
                   if (is_root) lists.push_back(b);
                   return g.backend->scatter(a, lists, options);
                 });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return start(c10d::OpType::SEND, "send", tensors, {}, tensors,
                 [g = gloo_, a = aliases(tensors), to, tag]() mutable { return g.backend->send(a, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return start(c10d::OpType::RECV, "recv", {}, tensors, tensors,
                 [g = gloo_, a = aliases(tensors), from, tag]() mutable { return g.backend->recv(a, from, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return start(c10d::OpType::BARRIER, "barrier", {}, {}, {}, [g = gloo_] { return g.backend->barrier({}); }, true);
  }

 private:
  using Run = std::function<WorkPtr()>;
  struct Open {
    Tensors reads, writes;
    std::vector<Run> runs;
  };

  WorkPtr all_reduce(c10d::OpType type, const char* name, const Tensors& tensors, c10d::ReduceOp operation) {
    return start(type, name, {}, tensors, tensors, [g = gloo_, a = aliases(tensors), operation] {
      g.all_reduce(a, operation);
      return WorkPtr();
    });
  }

  c10::Stream communication_stream(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!streams_.count(device)) streams_[device] = next_stream(device);
    return torch_stream(device, streams_[device]);
  }

  // Runs in the communication stream, after all that the current stream has been given.
  WorkPtr start(c10d::OpType type, const char* name, const Tensors& reads, const Tensors& writes, const Tensors& outputs,
                Run run, bool blocks = false) {
    Tensors used(reads);
    used.insert(used.end(), writes.begin(), writes.end());
    for (auto& each : used) {
      TORCH_CHECK(each.device().type() == kType, "No backend type associated with device type ", each.device().type());
      TORCH_CHECK(each.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    }
    int device = used.empty() ? current_device() : used[0].device().index();
    c10::Stream communication = communication_stream(device);
    Stream& own = stream_of(communication);
    if (open_) {
      open_->reads.insert(open_->reads.end(), reads.begin(), reads.end());
      open_->writes.insert(open_->writes.end(), writes.begin(), writes.end());
      open_->runs.push_back(std::move(run));
      return c10::make_intrusive<CollectiveWork>(type, outputs, Tensors{}, make_flight(name, 0, record(own)), communication, false);
    }
    gloo_.communicator->require_alive();
    sequence_++;
    wait_in_stream(own, record(current(device)));
    std::vector<Access> accesses;
    for (auto& each : reads) accesses.push_back(access(each, false));
    for (auto& each : writes) accesses.push_back(access(each, true));
    int64_t elements = 0;
    for (auto& each : writes.empty() ? reads : writes) elements += each.numel();
    FlightPtr flight = make_flight(name, elements, nullptr);
    launch(own, name, accesses, [flight, run = std::move(run)] { flight->communicator->run(flight, run); });
    flight->end = record(own);
    watch(flight);
    return c10::make_intrusive<CollectiveWork>(type, outputs, used, flight, communication, blocks);
  }

  FlightPtr make_flight(const std::string& name, int64_t elements, PointPtr end) {
    auto flight = std::make_shared<Flight>();
    flight->communicator = gloo_.communicator;
    flight->what = name + " of " + std::to_string(elements) + " elements, number " + std::to_string(sequence_) + " of its group";
    flight->timeout = options->timeout;
    flight->end = std::move(end);
    return flight;
  }

  Gloo gloo_;
  MakeGloo make_gloo_;
  std::optional<Open> open_;
  std::map<int, int64_t> streams_;
  std::mutex mutex_;
  uint64_t sequence_ = 0;
};

}  // namespace

void bind_group(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(module, "Options")
      .def("__deepcopy__", [](const GroupOptions& own, const py::dict&) { return c10::make_intrusive<GroupOptions>(own); });
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(module, "Group")
      .def_readonly("options", &Group::options)
      .def("_set_default_timeout", &Group::setTimeout);
  module.def("seed", &seed_generators, py::call_guard<py::gil_scoped_release>());
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("make_group", [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
                              MakeGloo make_gloo) {
    return c10::make_intrusive<Group>(store, rank, size, timeout, std::move(make_gloo));
  });
}

}  // namespace emulated
