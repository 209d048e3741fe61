// Ticket: the completion of one submitted group of transfers (or of one unit's update).
//
// A ticket finishes once, with or without an error, after all its parts have. Waiting for one never waits for
// another. Work that must follow it is attached with `on_done`, so nothing has to block a thread to be in order.
// What somebody waits for passes what nobody does yet: see `hurry`.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace infinity {

class Ticket {
 public:
  using Callback = std::function<void(std::exception_ptr)>;

  using Clock = std::chrono::steady_clock;

  explicit Ticket(std::size_t parts) : remaining_(parts), started_(Clock::now()) {}

  // What it waited for is over: its time counts from here.
  void begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    started_ = Clock::now();
  }

  // Seconds of the steady clock at which it began and finished; the second means nothing before it has.
  std::pair<double, double> times() const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto seconds = [](Clock::time_point at) { return std::chrono::duration<double>(at.time_since_epoch()).count(); };
    return {seconds(started_), seconds(finished_at_)};
  }

  // One part is over. The first error is kept and reported once all parts are over, so that no part is still
  // writing into memory that the waiter then frees.
  void part_done(std::exception_ptr error = nullptr) {
    end_part(std::move(error), false);
  }

  // One part was taken back before it started. Any other error is worse, and replaces this one.
  void part_cancelled(std::exception_ptr error) { end_part(std::move(error), true); }

  // What has not been handed to a device yet is not to be.
  void cancel() { cancelled_ = true; }
  bool cancelled() const { return cancelled_; }

  // Somebody waits: what of it has not started goes before what nobody waits for, and so does what it comes after.
  void hurry() const {
    if (hurried_.exchange(true)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (remaining_ != 0 && on_hurry_) on_hurry_();
  }
  bool hurried() const { return hurried_; }

  // What `hurry` calls, at most once and never when finished. It may hurry tickets that this one comes after.
  void on_hurry(std::function<void()> action) {
    std::lock_guard<std::mutex> lock(mutex_);
    on_hurry_ = std::move(action);
  }

  bool done() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return remaining_ == 0;
  }

  bool succeeded() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return remaining_ == 0 && !error_;
  }

  // True when finished within `seconds`; never throws the error.
  bool wait_for(double seconds) const {
    hurry();
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return remaining_ == 0; });
  }

  // Blocks until finished; throws the first error of its parts.
  void wait() const {
    hurry();
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return remaining_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }

  // Runs `callback` with the error (or null) when finished: at once if it is already.
  void on_done(Callback callback) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (remaining_ != 0) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback(error_);
  }

 private:
  void end_part(std::exception_ptr error, bool mild) {
    std::vector<Callback> callbacks;
    std::function<void()> on_hurry;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (error && (!error_ || (mild_ && !mild))) {
        error_ = std::move(error);
        mild_ = mild;
      }
      if (--remaining_ != 0) return;
      finished_at_ = Clock::now();
      callbacks.swap(callbacks_);
      on_hurry.swap(on_hurry_);
      finished_.notify_all();
    }
    for (auto& callback : callbacks) callback(error_);
  }

  std::atomic<bool> cancelled_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable finished_;
  std::size_t remaining_;
  Clock::time_point started_, finished_at_;
  std::exception_ptr error_;
  bool mild_ = false;  // error_ is a cancellation
  std::vector<Callback> callbacks_;
  mutable std::atomic<bool> hurried_{false};
  std::function<void()> on_hurry_;
};

using TicketPtr = std::shared_ptr<Ticket>;

// One ticket that finishes with all of `tickets`; null for none.
inline TicketPtr joined(const std::vector<TicketPtr>& tickets) {
  if (tickets.empty()) return nullptr;
  if (tickets.size() == 1) return tickets.front();
  auto all = std::make_shared<Ticket>(tickets.size());
  all->on_hurry([tickets] {
    for (const TicketPtr& ticket : tickets) ticket->hurry();
  });
  for (const TicketPtr& ticket : tickets)
    ticket->on_done([all](std::exception_ptr error) { all->part_done(std::move(error)); });
  return all;
}

}  // namespace infinity
