// Ticket: the completion of one submitted group of transfers, or of one unit's update.
//
// A ticket finishes once, with or without an error, after all its parts have, and what follows
// them. Waiting for one
// ticket never waits for another. Work that must follow a ticket is attached with `on_done`: no
// thread has to block.
//
// Thread safety: every member function may be called from any thread. `mutex_` guards the members
// marked so; `cancelled_` and `hurried_` are atomic.
// Callbacks of `on_done` run without a lock, on the thread that ends the last part, or on the
// caller's if the ticket has finished. They may submit, but must not wait for a transfer. They must
// not throw, nor may `then`: what fails in them is the error of a ticket that they end.
// Lock order: Extent -> Ticket -> a ticket that it comes after -> DirectReader -> IoEngine ->
// Backend.
// `hurry` calls the `on_hurry` action with `mutex_` held, so nothing may take a ticket's mutex
// while it holds the mutex of a reader, an engine or a backend.
// Ownership: waiters, and the parts that have not ended, share the ticket by TicketPtr.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "base/thread_safety.h"

namespace infinity {

class Ticket : public std::enable_shared_from_this<Ticket> {
 public:
  using Callback = std::function<void(std::exception_ptr)>;
  using Callbacks = std::list<Callback>;

  using Clock = std::chrono::steady_clock;
  using Step = std::function<void()>;

  explicit Ticket(std::size_t parts) : remaining_(parts), started_(Clock::now()) {}

  // Starts the clock: the tickets it comes after have finished.
  void begin() {
    Lock lock(mutex_);
    started_ = Clock::now();
  }

  // Seconds of the steady clock at which it began and finished. The second is valid once it has
  // finished.
  std::pair<double, double> times() const {
    Lock lock(mutex_);
    const auto seconds = [](Clock::time_point at) {
      return std::chrono::duration<double>(at.time_since_epoch()).count();
    };
    return {seconds(started_), seconds(finished_at_)};
  }

  // Ends one part. The first error is reported after the last part: until then a part may still
  // write into memory that the waiter would free.
  void part_done(std::exception_ptr error = nullptr) { end_part(std::move(error), false); }

  // Ends one part that was cancelled before it started. Any other error replaces this one.
  void part_cancelled(std::exception_ptr error) { end_part(std::move(error), true); }

  // Asks for the parts that no device has yet not to start.
  void cancel() { cancelled_ = true; }
  bool cancelled() const { return cancelled_; }

  // Raises the priority of this ticket's unstarted pieces, and of the tickets it depends on.
  void hurry() const {
    if (hurried_.exchange(true)) return;
    Lock lock(mutex_);
    if (remaining_ != 0 && on_hurry_) on_hurry_();
  }
  bool hurried() const { return hurried_; }

  // Sets what `hurry` calls: at most once, with the ticket's mutex held, and never after it has
  // finished. The action may hurry tickets that this one comes after.
  void on_hurry(std::function<void()> action) {
    Lock lock(mutex_);
    on_hurry_ = std::move(action);
  }

  // Sets what follows the parts if none fails: one more part, which `step` begins, on the thread
  // that ends the last of them, and which ends by `part_done`. Before any part has ended.
  void then(Step step) {
    Lock lock(mutex_);
    then_ = std::move(step);
  }

  // Ends one part as `other` ends; null: now, well. If there is no memory for that, it fails now.
  void part_follows(const std::shared_ptr<Ticket>& other) noexcept {
    if (!other) return part_done();
    try {
      other->on_done([kept = shared_from_this()](std::exception_ptr error) {
        kept->part_done(std::move(error));
      });
    } catch (...) {
      part_done(std::current_exception());
    }
  }

  bool done() const {
    Lock lock(mutex_);
    return remaining_ == 0;
  }

  bool succeeded() const {
    Lock lock(mutex_);
    return remaining_ == 0 && !error_;
  }

  // True if it finished within `seconds`. Does not throw the ticket's error.
  bool wait_for(double seconds) const {
    hurry();
    Lock lock(mutex_);
    return finished_.wait_for(lock, std::chrono::duration<double>(seconds),
                              [this]() INFINITY_REQUIRES(mutex_) { return remaining_ == 0; });
  }

  // Blocks until finished; throws the first error of its parts.
  void wait() const {
    hurry();
    Lock lock(mutex_);
    finished_.wait(lock, [this]() INFINITY_REQUIRES(mutex_) { return remaining_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }

  // Runs `callback` with the error (or null) when the ticket has finished, at once if it has
  // already.
  void on_done(Callback callback) {
    Callbacks one;
    one.push_back(std::move(callback));
    on_done(std::move(one));
  }

  // The same, of callbacks that were made before the ticket was: this cannot fail. If it could, a
  // transfer that has begun might end without a call.
  void on_done(Callbacks callbacks) noexcept {
    std::exception_ptr error;
    {
      Lock lock(mutex_);
      if (remaining_ != 0) {
        callbacks_.splice(callbacks_.end(), callbacks);
        return;
      }
      error = error_;
    }
    for (const Callback& callback : callbacks) callback(error);
  }

 private:
  void end_part(std::exception_ptr error, bool mild) {
    Callbacks callbacks;
    std::function<void()> on_hurry;
    Step then;
    std::exception_ptr first;
    {
      Lock lock(mutex_);
      if (error && (!error_ || (mild_ && !mild))) {
        error_ = std::move(error);
        mild_ = mild;
      }
      if (--remaining_ != 0) return;
      then.swap(then_);
      first = error_;
      if (then && !first) {
        remaining_ = 1;
      } else {
        then = nullptr;
        finished_at_ = Clock::now();
        callbacks.swap(callbacks_);
        on_hurry.swap(on_hurry_);
        finished_.notify_all();
      }
    }
    if (then) return then();
    for (const Callback& callback : callbacks) callback(first);
  }

  std::atomic<bool> cancelled_{false};
  mutable Mutex mutex_;
  mutable std::condition_variable finished_;
  std::size_t remaining_ INFINITY_GUARDED_BY(mutex_);
  Clock::time_point started_ INFINITY_GUARDED_BY(mutex_), finished_at_ INFINITY_GUARDED_BY(mutex_);
  std::exception_ptr error_ INFINITY_GUARDED_BY(mutex_);
  bool mild_ INFINITY_GUARDED_BY(mutex_) = false;  // error_ is a cancellation
  Callbacks callbacks_ INFINITY_GUARDED_BY(mutex_);
  mutable std::atomic<bool> hurried_{false};
  std::function<void()> on_hurry_ INFINITY_GUARDED_BY(mutex_);
  Step then_ INFINITY_GUARDED_BY(mutex_);
};

using TicketPtr = std::shared_ptr<Ticket>;

// One ticket that finishes with the last of `tickets`; null if there are none. Thread-safe.
inline TicketPtr joined(const std::vector<TicketPtr>& tickets) {
  if (tickets.empty()) return nullptr;
  if (tickets.size() == 1) return tickets.front();
  auto all = std::make_shared<Ticket>(tickets.size());
  all->on_hurry([tickets] {
    for (const TicketPtr& ticket : tickets) ticket->hurry();
  });
  Ticket::Callbacks follow;
  for (std::size_t i = 0; i < tickets.size(); ++i)
    follow.push_back([all](std::exception_ptr error) { all->part_done(std::move(error)); });
  for (const TicketPtr& ticket : tickets) {
    Ticket::Callbacks one;
    one.splice(one.begin(), follow, follow.begin());
    ticket->on_done(std::move(one));
  }
  return all;
}

}  // namespace infinity
