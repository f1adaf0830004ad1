// The watchdog, and the end of collectives that never finish.
#include "communicator.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <list>
#include <thread>

namespace emulated {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(50);

// What NCCL's process group does after a failure, by torch's numbers.
enum Handling { kNothing = 0, kAbortAndEndProcess = 1, kAbort = 2, kEndProcess = 3 };

Handling handling() {
  const char* value = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  return Handling(value ? std::atoi(value) : kEndProcess);
}

std::exception_ptr backend_error(const std::string& text) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, text));
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& found) {
    return found.what_without_backtrace();
  } catch (const std::exception& found) {
    return found.what();
  }
}

class Watchdog {
 public:
  // Never destroyed: its thread is detached. Started when first needed, as those of the streams.
  static Watchdog& get() {
    static auto* made = new Watchdog;
    return *made;
  }

  void add(FlightPtr flight) {
    std::lock_guard<std::mutex> lock(mutex_);
    flights_.push_back(std::move(flight));
    changed_.notify_all();
  }

  std::vector<FlightPtr> flights_of(const Communicator& communicator) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<FlightPtr> found;
    for (auto& each : flights_)
      if (each->communicator.get() == &communicator) found.push_back(each);
    return found;
  }

 private:
  Watchdog() {
    std::thread([this] {
      for (;;) look();
    }).detach();
  }

  void look() {
    std::list<FlightPtr> watched;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !flights_.empty(); });
    }
    std::this_thread::sleep_for(kPoll);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      watched = flights_;
    }
    watched.remove_if([&](const FlightPtr& each) { return is_in_flight(*each); });
    // Not under the mutex: who aborts a communicator may wait for one who launches.
    for (auto& each : watched)
      if (each->error() && !each->communicator->is_aborted()) handle(*each);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : watched) flights_.remove(each);
  }

  static bool is_in_flight(Flight& flight) {
    if (flight.end->query()) return false;
    auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - flight.launched);
    if (!flight.error() && waited > flight.timeout)
      flight.fail("timed out after " + std::to_string(waited.count()) + " ms, of which " + std::to_string(flight.timeout.count()) +
                  " were allowed");
    return !flight.error();
  }

  static void handle(const Flight& flight) {
    std::string text = text_of(flight.error());
    std::fprintf(stderr, "emulated device: watchdog: %s\n", text.c_str());
    std::fflush(stderr);
    Handling mode = handling();
    if (mode == kAbort || mode == kAbortAndEndProcess) flight.communicator->abort(text);
    if (mode == kEndProcess || mode == kAbortAndEndProcess) std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<FlightPtr> flights_;
};

}  // namespace

std::exception_ptr Flight::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Flight::fail(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) error_ = backend_error("[rank " + std::to_string(communicator->rank) + "] " + what + ": " + text);
}

void Flight::wait_on_host(std::chrono::milliseconds limit) {
  auto last = std::chrono::steady_clock::now() + limit;
  while (!end->query() && !error()) {
    if (std::chrono::steady_clock::now() > last) fail("not over after " + std::to_string(limit.count()) + " ms");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!error()) emulated::wait_on_host(end);
}

bool Communicator::is_aborted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_aborted_;
}

void Communicator::require_alive() const {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !is_aborted_, "emulated device: the communicator of rank ", rank, " has ended: ", reason_);
}

void Communicator::run(const FlightPtr& flight, const std::function<WorkPtr()>& collective) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    running_++;
  }
  try {
    if (is_aborted()) throw Aborted();
    if (auto work = collective()) finish(work);
  } catch (const Aborted&) {
    flight->fail("aborted");
  } catch (const std::exception& error) {
    // The kernel of a real collective would wait for its peer until it is aborted.
    flight->fail(error.what());
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_aborted_; });
  }
  std::lock_guard<std::mutex> lock(mutex_);
  running_--;
}

void Communicator::finish(const WorkPtr& work) {
  auto type = work->retrieveOpType();
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_aborted_) throw Aborted();
  if (type == c10d::OpType::SEND || type == c10d::OpType::RECV) {
    // These have no future, but can be interrupted.
    direct_.insert(work);
    lock.unlock();
    auto forget = [&] {
      lock.lock();
      direct_.erase(work);
      if (is_aborted_) throw Aborted();
    };
    try {
      work->wait();
    } catch (const std::exception&) {
      forget();
      throw;
    }
    forget();
    return;
  }
  lock.unlock();
  // Others cannot be interrupted: the stream leaves them to gloo's threads.
  auto is_over = std::make_shared<bool>(false);
  work->getFuture()->addCallback([self = shared_from_this(), is_over](c10::ivalue::Future&) {
    std::lock_guard<std::mutex> own(self->mutex_);
    *is_over = true;
    self->changed_.notify_all();
  });
  lock.lock();
  changed_.wait(lock, [&] { return *is_over || is_aborted_; });
  if (is_aborted_) throw Aborted();
  lock.unlock();
  work->wait();
}

void Communicator::abort(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_aborted_) return;
  reason_ = reason;
  is_aborted_ = true;
  for (auto& each : direct_) each->abort();
  // gloo's threads would have to be waited for.
  if (running_) new c10::intrusive_ptr<c10d::Backend>(gloo);
  changed_.notify_all();
}

void watch(FlightPtr flight) { Watchdog::get().add(std::move(flight)); }

void wait_for_flights(const Communicator& communicator) {
  for (auto& each : Watchdog::get().flights_of(communicator)) each->end->wait();
}

}  // namespace emulated
