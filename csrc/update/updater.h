// Updater: the optimizer step over extents, off the caller's thread: load -> step -> save, slot by
// slot.
//
//   unit update   one flat array of one unit: its extents, its layout, the runs to step
//   chunk         as many elements of a unit update as fit one slot; loaded, stepped and saved as
//                 one. Elements far from any run are in none
//   slot          fixed staging memory for a chunk's arrays that are on disk. Arrays in memory are
//                 stepped in place and need no slot
//   shadow        an update whose results go to other extents: all arrays, or the weights alone
//                 while the rest is updated in place. The weights it started from stay as they were
//
// While one chunk is stepped, the next ones load and the last ones save. Slots are the only staging
// memory, so memory does not depend on the size of a unit.
//
// Thread safety: every member function may be called from any thread, the destructor only while no
// other thread uses the updater. In a forked child only `is_ours` is valid. A UnitUpdate belongs to
// the updater from `submit` until its ticket finishes.
// `mutex_` and `submitting_` guard the members marked so. Slots, chunks, jobs and unfinished
// updates belong to the updater's thread alone. Failure, Recorder and Signal each have a mutex of
// their own.
// Lock order: submitting_ -> a ticket or any of the others. None of the others is held while
// another is taken, nor while a ticket is used.
// Ownership: the updater shares the engine and the slots' memory, and owns its threads. A job keeps
// its extents until it has finished.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <unistd.h>

#include "optim/kernel.h"
#include "base/thread_pool.h"
#include "base/thread_safety.h"
#include "io/engine.h"
#include "io/extent.h"
#include "io/ticket.h"
#include "update/team_size.h"

namespace infinity {

// An extent for each array of moments, and for the scales of 8-bit ones.
#define INFINITY_EXTENT(name, role, of_state) std::shared_ptr<Extent> name;
#define INFINITY_SCALE_EXTENT(name, role, of_state) std::shared_ptr<Extent> name##_scale;
#define INFINITY_MOMENT_EXTENTS     \
  INFINITY_MOMENTS(INFINITY_EXTENT) \
  INFINITY_SCALED_MOMENTS(INFINITY_SCALE_EXTENT)

// The extents that an update's results go to in place of its own: one of the same kind and size for
// each array, or one for the weights alone.
struct Shadow {
  std::shared_ptr<Extent> weight, master;
  INFINITY_MOMENT_EXTENTS
};

struct UnitUpdate {
  Layout layout;
  std::size_t count = 0;  // elements, a multiple of 4096
  std::shared_ptr<Extent> weight, master, grad;
  INFINITY_MOMENT_EXTENTS  // scales are in memory always
      std::vector<Run>
          runs;  // ascending and disjoint; other elements are not touched
  std::uint64_t version = 0;  // written into the extents
  TicketPtr after;  // the transfer of the gradient, or null
  int label = 0;  // names its owner in a timeline
  Shadow shadow;  // empty: in place
  TicketPtr ticket;  // set by `submit_all`
  double asked = 0;  // seconds of the steady clock, for a timeline; 0: when it was submitted
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
  int label;  // of the update
  std::optional<int> slot;  // none: its arrays are in memory
  double start, end;
  double ready;  // when all was there that it starts from
};

class Updater {
 public:
  // `slots` is slot_count equal parts of staging memory, empty if every home is in memory; `owner`
  // keeps it valid. Without `checksums` loads are not verified, and saves not summed. With
  // `measured` the updater measures how many of its threads are worth using.
  Updater(std::shared_ptr<IoEngine> engine, Span slots, int slot_count, int thread_count,
          std::shared_ptr<void> owner = nullptr, bool checksums = true, bool measured = false);
  ~Updater();  // finishes the submitted updates
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;

  // An update starts when its gradient has arrived: a hurried one first, else in the order of
  // submission. Its chunks are stepped in order. One that shares an extent with an earlier one
  // starts after it has finished. The ticket finishes when the new values are at home. After a
  // failed update all that have not been stepped fail with the same error: training must not go on
  // from a half-updated state.
  TicketPtr submit(UnitUpdate update);

  // Submits the updates that have no ticket yet, in order, and sets their tickets. If one is
  // refused, none is submitted.
  void submit_all(const std::vector<std::shared_ptr<UnitUpdate>>& updates);

  // false in a forked child, which has no threads
  bool is_ours() const { return getpid() == process_; }

  UpdaterTotals totals() const;

  // Starts to record every load, step and save of a slot; `take_events` returns and clears the
  // record.
  void record_events();
  std::vector<UpdaterEvent> take_events();

  // The elements of one chunk of `update`; 0 if a slot is too small for any.
  static std::size_t chunk_elements(const UnitUpdate& update, std::size_t slot_nbytes);

 private:
  struct Job {
    UnitUpdate update;
    TicketPtr ticket;
    Kernel kernel;
    std::vector<std::pair<std::size_t, std::size_t>> chunks;  // elements, begin and end
    std::size_t next = 0;  // the next chunk
    int loaded = 0, stepped = 0;  // chunks: they are stepped in order
    // Ends the ticket of a job that was never started.
    void end(const std::exception_ptr& error) const {
      while (!ticket->done()) ticket->part_done(error);
    }
  };
  // A job and its node of `unfinished_`, made at the submission: what has been submitted needs no
  // memory to begin, nor to end with an error.
  struct Waiting {
    std::shared_ptr<Job> job;
    std::list<std::shared_ptr<Job>> unfinished;
  };
  // The first error. Shared with the completions of saves, which may run after the updater is gone.
  struct Failure {
    Mutex mutex;
    std::exception_ptr error INFINITY_GUARDED_BY(mutex);
    void set(std::exception_ptr first) {
      Lock lock(mutex);
      if (!error) error = first;
    }
    std::exception_ptr get() {
      Lock lock(mutex);
      return error;
    }
  };
  // Shared with the completions of loads and saves, for the same reason.
  struct Recorder {
    using Clock = std::chrono::steady_clock;
    Mutex mutex;
    bool on INFINITY_GUARDED_BY(mutex) = false;
    std::vector<UpdaterEvent> events INFINITY_GUARDED_BY(mutex);
    // No slot: the arrays are in memory.
    void add(const char* kind, int label, std::optional<int> slot, double ready,
             double start) noexcept {
      const double end = now();
      Lock lock(mutex);
      try {
        if (on) events.push_back({kind, label, slot, start, end, ready});
      } catch (const std::bad_alloc&) {  // a timeline with a gap
      }
    }
    static double now() {
      return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    }
  };
  struct Part {  // one file-homed array of a chunk
    Extent* extent;
    Extent* target;  // that it is saved to; null: it is read only
    std::size_t at;  // bytes from either's start
    Span span;
    bool is_gradient = false;  // read only where a run has one
    Sums wrote = nullptr;  // the checksums that its bytes have to have
    Sums sums = nullptr;  // those of what is saved; null: it is read only
  };
  struct Copy {  // one array of a shadow's chunk that is at home in memory: bytes from its start on
    const std::byte* from;
    std::byte* to;
    std::size_t per_element;  // 0: one byte for each block of 8-bit moments
  };
  struct Chunk {
    std::shared_ptr<Job> job;
    std::size_t begin = 0, end = 0;
    int turn = 0;  // among the loaded chunks of its job
    std::optional<int> slot;  // none: no array of it is on disk
    Arrays arrays;  // element `begin` is at index `begin`
    std::vector<Part> parts;
    std::vector<Copy> copies;
    TicketPtr loads;
  };
  using Chunks = std::list<Chunk>;

  // Counts everything that the thread may wait for: the end of a load, a save or an update. Shared
  // with their completions, which may run after the updater is gone.
  struct Signal {
    Mutex mutex;
    std::condition_variable changed;
    std::uint64_t count INFINITY_GUARDED_BY(mutex) = 0;
    void raise() {
      {
        Lock lock(mutex);
        ++count;
      }
      changed.notify_all();
    }
  };

  // The staging memory of the next chunk.
  struct Place {
    std::optional<int> slot;  // none: the updater has no slots
  };

  std::shared_ptr<Job> make_job(const UnitUpdate& update) const;
  // Entries of `last_updates_`, as they were before a submission.
  using Before = std::vector<std::pair<TicketPtr*, TicketPtr>>;

  void put_in_order(Job& job, Before& entries) INFINITY_REQUIRES(submitting_);
  void forget_finished() INFINITY_REQUIRES(submitting_);
  void run();
  void serve(Chunks& loading);
  void end_all(const std::exception_ptr& error, Chunks& loading);
  bool start_next(Chunks& loading, const Place& place);
  static std::vector<std::pair<std::size_t, std::size_t>> tiles_with_gradient(const Chunk& chunk);
  void load(Chunk& chunk, const Place& place);
  void release(const Chunk& chunk, TicketPtr saves = nullptr) noexcept;
  void finish(Chunk& chunk);
  void step(Chunk& chunk);
  void step_tile(Chunk& chunk, const std::vector<std::vector<Constants>>& constants,
                 std::size_t begin, std::size_t end);
  std::optional<Place> free_place() const;
  double free_since() const;
  static double ready_at(const Chunk& chunk, const TicketPtr& inputs);

  const std::shared_ptr<IoEngine> engine_;
  const Span slots_;
  const std::size_t slot_nbytes_;
  const std::shared_ptr<void> owner_;  // of the slots' memory
  const bool checksums_;
  std::vector<TicketPtr> slot_saves_;
  std::vector<bool> slot_taken_;
  std::vector<double> slot_freed_;  // seconds of the steady clock
  std::list<Waiting> jobs_;  // of which a chunk has not been started
  std::list<std::shared_ptr<Job>> unfinished_;  // started, not at home yet
  ThreadPool pool_;
  std::optional<TeamSize> team_size_;  // none: all threads
  const int process_ = getpid();

  Mutex submitting_;  // one caller at a time: it orders updates by their extents
  std::unordered_map<const Extent*, TicketPtr> last_updates_ INFINITY_GUARDED_BY(submitting_);
  std::size_t kept_updates_ INFINITY_GUARDED_BY(submitting_) = 0;
  mutable Mutex mutex_;
  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  std::list<Waiting> submitted_ INFINITY_GUARDED_BY(mutex_);
  const std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();
  const std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  UpdaterTotals totals_ INFINITY_GUARDED_BY(mutex_);
  bool stopping_ INFINITY_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace infinity
