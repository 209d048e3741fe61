// Updater: the optimizer step over extents, off the caller's thread: load -> step -> save, slot by slot.
//
//   unit update   one flat array of one unit: its extents, its layout, the runs to step
//   chunk         as many elements of a unit update as fit one slot; loaded, stepped and saved as one
//   slot          fixed staging memory for the arrays of a chunk whose home is a file; arrays at home in memory are
//                 stepped where they lie and take no slot
//   shadow         an update whose results go beside the state it started from, which stays as it was: all of it, or the
//                 weights alone, and the rest is stepped where it lies
//
// While one chunk is stepped, the next are loading and the last ones saving. Slots are the only staging memory, so
// memory does not depend on the size of a unit.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <unistd.h>

#include "optim/kernel.h"
#include "base/thread_pool.h"
#include "io/engine.h"
#include "io/extent.h"
#include "io/ticket.h"
#include "update/team_size.h"

namespace infinity {

// Where an update's results go instead of the arrays they are made from: an extent of the same kind and size for each, or
// for the weights alone.
struct Shadow {
  std::shared_ptr<Extent> weight, master, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
};

struct UnitUpdate {
  Layout layout;
  std::size_t count = 0;  // elements, a multiple of 4096
  std::shared_ptr<Extent> weight, master, exp_avg, exp_avg_sq, grad;
  std::shared_ptr<Extent> exp_avg_scale, exp_avg_sq_scale;  // of 8-bit moments; in memory always
  std::vector<Run> runs;     // ascending and disjoint; elements outside them are not touched
  std::uint64_t version = 0;  // written into the extents
  TicketPtr after;            // the gradient's landing, or null
  int label = 0;              // whose it is, for a timeline
  Shadow shadow;                // empty: in place
  TicketPtr ticket;           // once it was submitted
  bool is_shadow() const { return shadow.weight != nullptr; }
};

struct UpdaterTotals {
  double step_seconds = 0;  // in the kernels and checksums
  double wait_seconds = 0;  // for loads or for a free slot
  std::uint64_t elements = 0;
};

// One piece of the pipeline's work, for a timeline: seconds of the steady clock.
struct UpdaterEvent {
  const char* kind;  // load, step or save
  int label;         // of the update
  int slot;
  double start, end;
};

class Updater {
 public:
  // `slots` is slot_count equal parts of staging memory, empty when every home is memory; `owner` keeps that memory.
  // Without `checksums` what is loaded is not verified, and what is saved not summed. With `measured` as many of the
  // threads step as were found to be worth it.
  Updater(std::shared_ptr<IoEngine> engine, Span slots, int slot_count, int thread_count,
          std::shared_ptr<void> owner = nullptr, bool checksums = true, bool measured = false);
  ~Updater();  // finishes what was submitted
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;

  // Updates run in the order of submission; one that shares an extent with another starts when that one is at home.
  // The ticket finishes when the new values are at home. After a failed one
  // every later one fails with the same error: a half-updated state must not train on.
  TicketPtr submit(UnitUpdate update);

  // Submits those that have no ticket yet, in order, and gives each its ticket: all of them, or, when one is refused, none.
  void submit_all(const std::vector<std::shared_ptr<UnitUpdate>>& updates);

  bool is_ours() const { return getpid() == process_; }  // false in a forked child, which has no threads

  UpdaterTotals totals() const;

  // From now on every load, step and save of a slot is remembered, until it is taken.
  void record_events();
  std::vector<UpdaterEvent> take_events();

  // Elements of one chunk for `layout` with these file-homed arrays; 0 when a slot is too small for any.
  static std::size_t chunk_elements(const UnitUpdate& update, std::size_t slot_nbytes);

 private:
  struct Job {
    UnitUpdate update;
    TicketPtr ticket;
    Kernel kernel;
    std::size_t chunk = 0;  // elements
    std::size_t next = 0;   // first element of the next chunk
  };
  // The first error, shared with the completions of saves, which may come in after the updater is gone.
  struct Failure {
    std::mutex mutex;
    std::exception_ptr error;
    void set(std::exception_ptr first) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = first;
    }
    std::exception_ptr get() {
      std::lock_guard<std::mutex> lock(mutex);
      return error;
    }
  };
  // Shared with the completions of loads and saves, for the same reason.
  struct Recorder {
    using Clock = std::chrono::steady_clock;
    std::mutex mutex;
    bool on = false;
    std::vector<UpdaterEvent> events;
    void add(const char* kind, int label, int slot, Clock::time_point start) {
      const auto end = Clock::now();
      const auto seconds = [](Clock::time_point at) { return std::chrono::duration<double>(at.time_since_epoch()).count(); };
      std::lock_guard<std::mutex> lock(mutex);
      if (on) events.push_back({kind, label, slot, seconds(start), seconds(end)});
    }
  };
  struct Part {  // one file-homed array of a chunk
    Extent* extent;
    Extent* target;  // where it is saved to; null: nowhere
    std::size_t at;  // bytes from either's start
    Span span;
  };
  struct Copy {  // one array of a shadow's chunk that is at home in memory: bytes from its start on
    const std::byte* from;
    std::byte* to;
    std::size_t per_element;  // 0: one byte for each block of 8-bit moments
  };
  struct Chunk {
    std::shared_ptr<Job> job;
    std::size_t begin = 0, end = 0;
    int slot = -1;
    Arrays arrays;  // element `begin` is at index `begin`
    std::vector<Part> parts;
    std::vector<Copy> copies;
    TicketPtr loads;
  };

  // Told of everything that the thread may wait for: a load, a save or an update that is over. Shared with their
  // completions, which may come in after the updater is gone.
  struct Signal {
    std::mutex mutex;
    std::condition_variable told;
    std::uint64_t count = 0;
    void tell() {
      {
        std::lock_guard<std::mutex> lock(mutex);
        ++count;
      }
      told.notify_all();
    }
  };

  std::shared_ptr<Job> make_job(const UnitUpdate& update) const;
  void run();
  void serve(std::deque<Chunk>& loading);
  void end_all(const std::exception_ptr& error, std::deque<Chunk>& loading);
  bool touched(const Job& job, std::size_t begin, std::size_t end) const;
  bool start_next(std::deque<Chunk>& loading, int slot);
  bool conflicts(const Job& job);
  void load(Chunk& chunk, int slot);
  void finish(Chunk& chunk);
  void step(Chunk& chunk);
  void step_tile(Chunk& chunk, const std::vector<Constants>& constants, std::size_t begin, std::size_t end);
  int free_slot() const;

  const std::shared_ptr<IoEngine> engine_;
  const Span slots_;
  const std::size_t slot_nbytes_;
  const std::shared_ptr<void> owner_;  // of the slots' memory
  const bool checksums_;
  std::vector<TicketPtr> slot_saves_;
  std::vector<bool> slot_taken_;
  std::vector<std::shared_ptr<Job>> unfinished_;  // started, not at home yet
  ThreadPool pool_;
  std::optional<TeamSize> team_size_;  // none: all threads
  const int process_ = getpid();

  mutable std::mutex mutex_;
  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  std::deque<std::shared_ptr<Job>> jobs_;
  const std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();
  const std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  UpdaterTotals totals_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace infinity
