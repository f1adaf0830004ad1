// How collectives fail: late, as NCCL's do, and not in the call that launched them.
//
// A collective whose peer is gone blocks its stream, and with it a host that waits for the stream.
// A watchdog finds such collectives and those that exceed their time. As NCCL's, it then does what
// TORCH_NCCL_ASYNC_ERROR_HANDLING says: it ends the process, which is the default, or the
// communicator, or leaves both alone.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "world.h"

namespace emulated {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class Communicator;

// A collective that has been launched.
struct Flight {
  std::shared_ptr<Communicator> communicator;
  std::string what;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point launched = std::chrono::steady_clock::now();
  PointPtr end;

  std::exception_ptr error() const;
  void fail(const std::string& text);
  // Returns when the collective is over, has failed, or has not ended within a limit, which is a failure.
  void wait_on_host(std::chrono::milliseconds limit);

 private:
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};
using FlightPtr = std::shared_ptr<Flight>;

// What the collectives of one group have in common.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int rank, c10::intrusive_ptr<c10d::Backend> gloo) : rank(rank), gloo(std::move(gloo)) {}

  const int rank;
  const c10::intrusive_ptr<c10d::Backend> gloo;  // Moves the bytes.

  bool is_aborted() const;
  // Raises if the communicator has been aborted or shut down.
  void require_alive() const;

  // In the stream: runs a collective to its end, to that of the communicator, or for ever.
  void run(const FlightPtr& flight, const std::function<WorkPtr()>& collective);
  // Waits for a message of gloo; throws its error, or Aborted.
  void finish(const WorkPtr& work);
  struct Aborted {};

  // Ends all collectives.
  void abort(const std::string& reason);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_aborted_ = false;
  std::string reason_;
  std::set<WorkPtr> direct_;  // Messages between two ranks that a stream waits for.
  int running_ = 0;
};

// Begins to watch a collective.
void watch(FlightPtr flight);
// Waits for all collectives of a communicator.
void wait_for_flights(const Communicator& communicator);

}  // namespace emulated
