// IoEngine: moves spans between memory and files, with many pieces in flight, and reads each
// result.
//
//   request   one span and one place in one file
//   piece     at most `block_nbytes` of a request; the unit that a backend moves
//   queue     the pieces of one device: up to `depth` of them in flight, the others waiting. Pieces
//             whose ticket is awaited start first. A slow or hung device delays its own pieces
//             alone
//   ticket    the completion of all requests of one submission
//   memory    kept by a request until its transfer has ended, even if the ticket is dropped
//   work      on a request's bytes (their checksums), done per piece by the engine's own threads:
//             after a read has arrived, or before a write starts. The piece ends when both are done
//   memory    that a piece needs until it is over is taken as it is submitted: from there on it
//   only
//             moves from list to list. What cannot be had later (a thread's job, the text of an
//             error) is done without
//   hung      a device that has not answered for `timeout_seconds`. The transfer's ticket fails,
//             and so does every later one on that file. The device may still write to the memory,
//             which is never freed
//
// Results: a negative one is an error, a short one continues where it stopped, zero inside a file
// is corruption (the file is shorter than it was made). Waiting pieces start as others end, so a
// disk never idles between requests.
//
// Limit: at most `max_pieces` are submitted and not over; `submit` refuses more with UsageError. It
// does not block: the thread that waits could be the one that ends what the pieces ahead wait for
// (an `after` that Python completes, or a submission from a completion). Callers bound their own
// windows far below.
//
// Thread safety: every member function may be called from any thread, `shut_down` and the
// destructor only while no other thread uses the engine. In a forked child only `is_ours` and the
// destructor's guard in the bindings are valid. Completions (`Ticket::on_done`) run on the engine's
// threads without its mutex: they may submit, cancel or drop files.
// `mutex_` guards the members marked so. The backend is called with `mutex_` held, except for
// `wait`.
// Lock order: Extent -> Ticket -> DirectReader -> IoEngine -> Backend. `Ticket::hurry` calls the
// engine with the ticket's mutex held, so the engine ends tickets, and hurries them, without its
// own.
// Ownership: the engine owns its files' descriptors, its backend and its threads. A transfer in
// flight owns a share of its file, its memory and its ticket. The engine has to outlive its
// unfinished tickets.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/thread_safety.h"
#include "base/work_queue.h"
#include "io/backend.h"
#include "io/files.h"
#include "io/ticket.h"

namespace infinity {

class PieceWork {
 public:
  virtual ~PieceWork() = default;

  // Reads one part of the request's span. Called once per piece, in any order, by several threads
  // at once. What it throws becomes the ticket's error.
  virtual void look_at(Span piece) = 0;
};

struct Request {
  Op op;
  int file;
  std::uint64_t offset;
  Span span;
  std::shared_ptr<void> memory = nullptr;  // that the span is in; null: the caller keeps it valid
  std::shared_ptr<PieceWork> work = nullptr;
  bool is_bounded = false;  // by who submits it: `max_pieces` does not count
};

struct IoOptions {
  std::string kind = "auto";  // auto, uring or threads
  unsigned depth = 64;  // pieces in flight per device
  std::size_t block_nbytes = 1024 * 1024;
  int threads = 8;  // of the thread backend, per device
  int work_threads = 1;  // upper bound over all devices; started on demand
  double timeout_seconds = 120;
  std::size_t max_pieces = std::size_t{1} << 22;  // submitted and not over
  // chooses the backend; null: the engine does
  std::shared_ptr<const BackendLayer> layer = nullptr;
};

struct IoTotals {
  std::uint64_t nbytes = 0;
  double busy_seconds = 0;  // with at least one piece in flight
};

class IoEngine {
 public:
  explicit IoEngine(const IoOptions& options);
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Waits for all transfers, then closes the files, even if others still hold this object. Unnamed
  // files are gone then. A second call does nothing; later submissions throw UsageError.
  void shut_down();

  // Creates and opens a file as create_named_file does (io/files.h). Returns its index.
  int create_file(const std::string& path, std::uint64_t nbytes);

  // Creates and opens a file without a name, as create_unnamed_file does. Returns its index.
  int create_swap_file(const std::string& folder, std::uint64_t nbytes);

  // Closes the file after its running transfers complete; idempotent. Transfers that wait for an
  // `after` are cancelled, later ones are refused, and the index is not used again. `behind`: a
  // thread of its own closes it, because a file system takes long to free a large file. Otherwise
  // an idle file is closed on return.
  void drop_file(int index, bool behind = true);

  // The indices of the files that have not been dropped.
  std::vector<int> open_files() const;

  // Opens an existing file as open_existing_file does. Returns its index.
  int open_file(const std::string& path);

  // Registers the open files and the staging memory with the backend, in place of those before. The
  // engine keeps `owners` of the memory until it registers others: the kernel moves the registered
  // pages, whatever is mapped at their addresses by then. Waits `seconds` for transfers to end;
  // returns false, with nothing changed, if some still run. Throws StorageError if a device is
  // hung: it may still move the pages.
  bool register_files_and_buffers(const std::vector<Span>& buffers,
                                  std::vector<std::shared_ptr<const void>> owners = {},
                                  double seconds = 1e9);

  // Starts the requests, at once or when `after` has finished without error. Addresses, offsets and
  // lengths are multiples of 4096. Memory that a request does not hold has to stay valid until the
  // ticket has finished. `then` begins what follows them, and ends it (Ticket::then). Never blocks
  // on a transfer. Throws UsageError, with nothing started, for a request that `validate` refuses
  // or beyond `max_pieces`.
  using Then = std::function<void(const TicketPtr&)>;
  TicketPtr submit(const std::vector<Request>& requests, const TicketPtr& after = nullptr,
                   Then then = nullptr);

  // Cancels the pieces of `ticket` that have not started, also those that wait for an `after`.
  // Started pieces finish. The ticket then fails with ECANCELED, or with the error of a started
  // piece.
  void cancel(const TicketPtr& ticket);

  // Throws UsageError, with the numbers, if the request is outside its file or not aligned.
  void validate(const Request& request) const;

  // False in a forked child, which has none of the threads.
  bool is_ours() const { return getpid() == process_; }

  // The path of a file whose device timed out, or of any file if the backend failed. Otherwise
  // empty. The memory of such transfers is never freed.
  std::string hung() const;

  const char* backend_name() const { return backend_name_; }
  std::vector<std::string> notes() const {
    Lock lock(mutex_);
    return notes_;
  }
  // A copy, which keeps the file open. Throws UsageError for an index that does not exist.
  File file(int index) const;
  IoTotals totals(Op op) const;

 private:
  struct InFlight {
    Piece piece;
    TicketPtr ticket;
    std::shared_ptr<void> memory;
    std::shared_ptr<PieceWork> work;
    std::shared_ptr<OpenFile> open = nullptr;
    Span whole = {};  // `piece` is the rest of it that has not been moved
    int stalled = 0;  // results in a row that moved nothing usable
    double started = 0;  // by clock_; the time at which it may have reached the kernel
    bool needs_work = false;  // now: it has arrived, or is a write that has not been started
    bool cancelled = false;
    std::exception_ptr error = nullptr;
  };
  // Made at the submission. A piece stays in its node, which goes from a queue to a slot, and at
  // last to a list of those that are over.
  using Pieces = std::list<InFlight>;
  struct Slot {
    Pieces piece;  // one, or none
    bool given_up = false;  // its ticket has failed; the slot waits for the device
    std::shared_ptr<void> memory;  // of what was given up
    std::shared_ptr<OpenFile> open;
  };
  struct Queue {
    std::string device;
    Pieces awaited, others;
    unsigned in_flight = 0;
    Pieces& of(const Ticket& ticket) { return ticket.hurried() ? awaited : others; }
  };
  struct Held {  // what a hung device may still use after the engine's end
    std::deque<File> files;
    std::vector<std::shared_ptr<const void>> registered;
    std::deque<Slot> slots;
  };

  void check(const Request& request) const INFINITY_REQUIRES(mutex_);
  int add(File file) INFINITY_EXCLUDES(mutex_);
  int queue_of(const std::string& device) INFINITY_REQUIRES(mutex_);
  void hurry(const Ticket* ticket) INFINITY_EXCLUDES(mutex_);
  bool is_idle() const INFINITY_REQUIRES(mutex_);
  // `finished`: the pieces that are over, or need their work done now.
  void take_from_slot(std::uint32_t id, Pieces& to) noexcept INFINITY_REQUIRES(mutex_);
  void enqueue(Pieces& pieces) noexcept INFINITY_EXCLUDES(mutex_);
  void start_waiting(Pieces& finished) noexcept INFINITY_REQUIRES(mutex_);
  void run() INFINITY_EXCLUDES(mutex_);
  void serve(Pieces& finished) INFINITY_EXCLUDES(mutex_);
  void end_parts(Pieces& finished) noexcept INFINITY_EXCLUDES(mutex_);
  void queue_work(Pieces& first) noexcept INFINITY_EXCLUDES(mutex_);
  void work_on(Pieces::iterator entry) noexcept INFINITY_EXCLUDES(mutex_);
  void fail_the_waiting(Pieces& finished) noexcept INFINITY_REQUIRES(mutex_);
  void fail(InFlight& entry) const noexcept INFINITY_REQUIRES(mutex_);
  void break_down(const std::exception_ptr& error, Pieces& finished) noexcept
      INFINITY_REQUIRES(mutex_);
  void complete(const PieceResult& result, Pieces& finished) noexcept INFINITY_REQUIRES(mutex_);
  void give_up_on_the_hung(Pieces& finished) INFINITY_REQUIRES(mutex_);
  void give_up(std::uint32_t id, std::exception_ptr error, Pieces& finished) noexcept
      INFINITY_REQUIRES(mutex_);
  void replace_given_up() INFINITY_REQUIRES(mutex_);
  // between checks for hung devices
  double tick() const { return std::min(5.0, options_.timeout_seconds / 8); }
  std::exception_ptr hung_error(const Piece& piece) const noexcept INFINITY_REQUIRES(mutex_);
  void count(Op op, int change, std::size_t nbytes) INFINITY_REQUIRES(mutex_);

  const IoOptions options_;
  const int process_ = getpid();
  std::unique_ptr<Backend> backend_;
  const char* backend_name_ = "";

  mutable Mutex mutex_;
  std::condition_variable idle_;
  std::vector<std::string> notes_ INFINITY_GUARDED_BY(mutex_);
  std::unique_ptr<Held> held_ = std::make_unique<Held>();
  std::deque<File>& files_ INFINITY_GUARDED_BY(mutex_) = held_->files;
  // memory
  std::vector<std::shared_ptr<const void>>& registered_ INFINITY_GUARDED_BY(mutex_) =
      held_->registered;
  std::deque<Queue> queues_ INFINITY_GUARDED_BY(mutex_);
  // It grows by one slot for each piece that was given up, so that other disks go on.
  std::deque<Slot>& slots_ INFINITY_GUARDED_BY(mutex_) = held_->slots;
  std::size_t usable_ INFINITY_GUARDED_BY(mutex_) = 0;  // slots, without those of given-up pieces
  std::vector<std::uint32_t> free_slots_ INFINITY_GUARDED_BY(mutex_);  // with room for all slots
  Pieces working_ INFINITY_GUARDED_BY(mutex_);  // whose work a thread does, or is about to
  std::size_t pieces_ INFINITY_GUARDED_BY(mutex_) = 0;  // submitted and not over
  // submissions that wait for their `after`
  std::size_t dependent_ INFINITY_GUARDED_BY(mutex_) = 0;
  std::size_t worked_on_ INFINITY_GUARDED_BY(mutex_) = 0;  // pieces
  // Seconds in which this process ran: after a SIGSTOP, the device must not be blamed for them.
  double clock_ INFINITY_GUARDED_BY(mutex_) = 0;
  double next_look_ INFINITY_GUARDED_BY(mutex_) = 0;  // by clock_
  std::size_t given_up_ INFINITY_GUARDED_BY(mutex_) = 0;  // slots that wait for a hung device
  bool troubled_ INFINITY_GUARDED_BY(mutex_) = false;  // a device is hung, or broken_ is set
  // why the backend cannot be used any longer
  std::exception_ptr broken_ INFINITY_GUARDED_BY(mutex_);
  // tickets end outside the lock and may submit
  bool completing_ INFINITY_GUARDED_BY(mutex_) = false;
  bool stopping_ INFINITY_GUARDED_BY(mutex_) = false;

  struct Meter {
    IoTotals totals;
    int active = 0;
    std::chrono::steady_clock::time_point since;
  };
  std::array<Meter, 2> meters_ INFINITY_GUARDED_BY(mutex_);
  WorkQueue works_;
  std::vector<PieceResult> results_;  // of the completion thread, with room for those of all slots
  std::thread completion_thread_;
};

}  // namespace infinity
