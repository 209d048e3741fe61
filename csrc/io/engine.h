// IoEngine: moves spans between memory and files, many pieces in flight, each result read.
//
//   request   what a caller asks for: one span, one place in one file
//   piece     at most `block_nbytes` of a request; what a backend moves
//   queue     the pieces of one device: up to `depth` of them in flight, the others wait there, those of a ticket that somebody waits
//             for before those of others. So a slow or hung device delays what it has to move, and nothing else
//   ticket    the completion of all requests of one call
//   memory    of a request: kept by it until the transfer is over, whatever becomes of its ticket
//   work      on a request's bytes (their checksums): done on each piece by threads of the engine's own, when a read's has arrived and
//             before a write's sets out. A piece is over, for its ticket, when both are
//   hung      a device that has not answered for `timeout_seconds`: the transfer's ticket fails, and so does every
//             later one on that file. The device may still write its memory, which is therefore never given back
//
// Results: negative is an error, short is continued from where it stopped, zero inside an extent is corruption (the
// file is shorter than it was made). Pieces beyond `depth` start as others finish: a disk never drains between requests.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/work_queue.h"
#include "io/backend.h"
#include "io/files.h"
#include "io/ticket.h"

namespace infinity {

class PieceWork {
 public:
  virtual ~PieceWork() = default;

  // Looks at a part of the request's span. Called once for each piece, in any order, by several threads at once. Throws what the ticket
  // is to fail with.
  virtual void look_at(Span piece) = 0;
};

struct Request {
  Op op;
  int file;
  std::uint64_t offset;
  Span span;
  std::shared_ptr<void> memory = nullptr;  // what the span lies in; null: the caller sees to it
  std::shared_ptr<PieceWork> work = nullptr;
};

struct IoOptions {
  std::string kind = "auto";  // auto, uring or threads
  unsigned depth = 64;  // of each device
  std::size_t block_nbytes = 1024 * 1024;
  int threads = 8;  // of the thread backend, for each device
  int work_threads = 1;  // at most, for all devices; those that there is no work for are never started
  double timeout_seconds = 120;
  std::size_t max_pieces = std::size_t{1} << 22;  // submitted and not over
  std::shared_ptr<const BackendLayer> layer = nullptr;  // chooses the backend; null: the engine does
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

  // Waits for what is in flight, then closes the files, whoever still holds this object: what has no name is gone then. A second call
  // does nothing; a submission raises UsageError. Not beside one: who shuts down owns the engine.
  void shut_down();

  // Creates `path` with mode 0600 and reserves `nbytes` on its file system, so that no later write can meet
  // ENOSPC. O_DIRECT where the file system has it. Returns the file's index. Throws StorageError.
  int create_file(const std::string& path, std::uint64_t nbytes);

  // The same without a name: nobody can find the file in `folder`, open or remove it, and its space is free as soon as this
  // process ends, however it does. Messages about it name `folder`.
  int create_swap_file(const std::string& folder, std::uint64_t nbytes);

  // Closes a file once all that was begun of it is over: a swap file's space is free then, or soon after. What has not begun, and waits for
  // something else, is cancelled; no transfer is accepted. Its index stays taken. Done twice it is done once. `behind`: by a thread of its own,
  // for a file system takes long to free the space of a large file; else, where nothing was begun, before this returns.
  void drop_file(int index, bool behind = true);

  // The files that have not been dropped.
  std::vector<int> open_files() const;

  // Opens `path`, which is there already, O_DIRECT where possible; to read only where that is all it allows. Returns the file's index. Throws StorageError.
  int open_file(const std::string& path);

  // Tells the backend the files made so far and the staging memory. Call while nothing is in flight.
  void register_files_and_buffers(const std::vector<Span>& buffers);

  // Starts the requests, at once or when `after` has finished without error. Addresses, offsets and lengths are
  // multiples of 4096. Memory that a request does not hold itself stays valid until the ticket has finished.
  TicketPtr submit(const std::vector<Request>& requests, const TicketPtr& after = nullptr);

  // Takes back what of `ticket` has not started, also behind an `after`; the ticket then fails with ECANCELED, or with
  // what went wrong with the rest. What has started finishes.
  void cancel(const TicketPtr& ticket);

  // Throws UsageError, with the numbers, for a request that `submit` would refuse.
  void validate(const Request& request) const;

  // False in a forked child, which has neither the threads nor a ring of its own.
  bool is_ours() const { return getpid() == process_; }

  // The path of a file whose device did not answer in time, or of any where the backend failed: what it may still write to is never given
  // back. Else empty.
  std::string hung() const;

  const char* backend_name() const { return backend_name_; }
  std::vector<std::string> notes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return notes_;
  }
  // A copy, which keeps the file open.
  File file(int index) const;
  IoTotals totals(Op op) const;

 private:
  struct InFlight {
    Piece piece;
    TicketPtr ticket;
    std::shared_ptr<void> memory;
    std::shared_ptr<PieceWork> work;
    std::shared_ptr<OpenFile> open;
    Span whole;  // of which `piece` is what has not been moved yet
    int stalled = 0;       // results in a row that moved nothing usable
    double started = 0;    // by clock_; reached the kernel, or may have
    bool given_up = false;  // its ticket was told; the slot waits for the device
  };
  struct Part {  // of a ticket that is over, or that has arrived and is to be worked on
    TicketPtr ticket;
    std::exception_ptr error;
    bool cancelled = false;
    std::shared_ptr<InFlight> arrived = nullptr;
  };
  using Finished = std::vector<Part>;
  struct Queue {
    std::string device;
    std::deque<InFlight> awaited, others;
    unsigned in_flight = 0;
    std::deque<InFlight>& of(const Ticket& ticket) { return ticket.hurried() ? awaited : others; }
  };

  void check(const Request& request) const;
  int add(File file);
  int queue_of(const std::string& device);
  void hurry(const Ticket* ticket);
  bool is_idle() const;
  void free_slot(std::uint32_t id);
  void enqueue(const std::vector<Request>& requests, const TicketPtr& ticket);
  void start_waiting(Finished& finished);
  void run();
  void serve(Finished& finished);
  void tell(Finished& finished);
  void discharge(std::size_t pieces);
  void have_worked_on(std::shared_ptr<InFlight> entry);
  void work_on(InFlight& entry);
  void fail_the_waiting(Finished& finished);
  Part failed(const InFlight& entry) const;
  void break_down(const std::exception_ptr& error, Finished& finished);
  void complete(const PieceResult& result, Finished& finished);
  void give_up_on_the_hung(Finished& finished);
  void give_up(std::uint32_t id, std::exception_ptr error, Finished& finished);
  double tick() const { return std::min(5.0, options_.timeout_seconds / 8); }  // between looks for hung devices
  std::exception_ptr hung_error(const Piece& piece) const;
  void count(Op op, int change, std::size_t nbytes);

  const IoOptions options_;
  const int process_ = getpid();
  std::unique_ptr<Backend> backend_;
  const char* backend_name_ = "";
  std::vector<std::string> notes_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<File> files_;  // its references stay valid as files are added
  std::deque<Queue> queues_;
  std::deque<InFlight> slots_;  // grows by one for each that is given up, so that other disks go on
  std::vector<std::uint32_t> free_slots_;
  std::size_t pieces_ = 0;     // submitted and not over
  std::size_t dependent_ = 0;  // submissions that wait for their `after`
  std::size_t worked_on_ = 0;  // pieces
  double clock_ = 0;          // seconds in which this process ran: one that was stopped must not blame the device
  double next_look_ = 0;      // by clock_
  std::size_t given_up_ = 0;  // slots that wait for a hung device
  bool troubled_ = false;     // a device is hung, or broken_: what waits is looked through
  std::exception_ptr broken_;  // why the backend cannot serve any longer
  bool completing_ = false;   // tickets are being told outside the lock: what follows them may submit
  bool stopping_ = false;

  struct Meter {
    IoTotals totals;
    int active = 0;
    std::chrono::steady_clock::time_point since;
  };
  std::array<Meter, 2> meters_;
  WorkQueue works_;
  std::thread completion_thread_;
};

}  // namespace infinity
