#include "io/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace infinity {
namespace {

const char* verb(Op op) { return op == Op::kRead ? "read" : "write"; }

std::unique_ptr<Backend> make_real_backend(const IoOptions& options,
                                           std::vector<std::string>& notes) {
  if (options.kind != "threads") {
    std::string why;
    if (auto backend = make_uring_backend(options.depth, why)) return backend;
    INFINITY_REQUIRE(options.kind != "uring", "the uring engine was asked for, but ", why);
    notes.push_back("threads instead of io_uring: " + why);
  }
  return make_threads_backend(options.threads);
}

std::unique_ptr<Backend> make_backend(const IoOptions& options, std::vector<std::string>& notes) {
  INFINITY_REQUIRE(options.kind == "auto" || options.kind == "uring" || options.kind == "threads",
                   "unknown I/O engine '", options.kind, "': use auto, uring or threads");
  const auto real = [&] { return make_real_backend(options, notes); };
  return options.layer ? options.layer->make(real) : real();
}

void end_part(const TicketPtr& ticket, const std::exception_ptr& error, bool cancelled) {
  if (cancelled)
    ticket->part_cancelled(error);
  else
    ticket->part_done(error);
}

std::string describe(const Piece& piece, const File& file) {
  return concat(verb(piece.op), " of ", piece.nbytes, " bytes at offset ", piece.offset, " of ",
                file.path);
}

}  // namespace

IoEngine::IoEngine(const IoOptions& options) : options_(options), works_(options.work_threads) {
  INFINITY_REQUIRE(options.depth >= 1 && options.depth <= kMaxInFlight, "I/O depth ", options.depth,
                   " is not in 1..", kMaxInFlight);
  INFINITY_REQUIRE(options.block_nbytes <= (1u << 30), "I/O block of ", options.block_nbytes,
                   " bytes is over 1 GiB");
  INFINITY_REQUIRE(options.block_nbytes >= kBlockNbytes && options.block_nbytes % kBlockNbytes == 0,
                   "I/O block of ", options.block_nbytes, " bytes is not a multiple of ",
                   kBlockNbytes);
  INFINITY_REQUIRE(options.threads >= 1, "the thread engine needs at least one thread, not ",
                   options.threads);
  INFINITY_REQUIRE(options.max_pieces >= 1, "a limit of ", options.max_pieces, " I/O pieces");
  INFINITY_REQUIRE(options.timeout_seconds > 0, "an I/O timeout of ", options.timeout_seconds,
                   " seconds");
  backend_ = make_backend(options, notes_);
  backend_name_ = backend_->name();
  try {
    completion_thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw StorageError(error.code().value(), "",
                       "the system refuses a thread for I/O (a limit on processes: `ulimit -u`, or "
                       "the container's pids)");
  }
}

IoEngine::~IoEngine() { shut_down(); }

void IoEngine::shut_down() {
  {
    Lock lock(mutex_);
    if (stopping_) return;
    idle_.wait(lock, [this]() INFINITY_REQUIRES(mutex_) { return is_idle(); });
    stopping_ = true;
    backend_->wake();
  }
  completion_thread_.join();
  works_.stop();
  Lock lock(mutex_);  // for `file` and `open_files`, which may still be called
  if (given_up_) {
    // A thread that waits for a hung device cannot be joined. The descriptors stay open: if the
    // device answers after all, its write must not go to another file with the same number. The
    // memory stays too.
    backend_->abandon();
    (void)backend_.release();
    (void)new std::deque<InFlight>(std::move(slots_));
    (void)new std::deque<File>(files_);
    (void)new std::vector<std::shared_ptr<const void>>(std::move(registered_));
    return;
  }
  backend_.reset();
  registered_.clear();
  for (File& file : files_) {
    file.descriptor = -1;
    file.open.reset();
  }
}

int IoEngine::create_file(const std::string& path, std::uint64_t nbytes) {
  File file = create_named_file(path, nbytes);
  try {
    return add(std::move(file));
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
}

int IoEngine::create_swap_file(const std::string& folder, std::uint64_t nbytes) {
  return add(create_unnamed_file(folder, nbytes));
}

int IoEngine::open_file(const std::string& path) { return add(open_existing_file(path)); }

void IoEngine::drop_file(int index, bool behind) {
  INFINITY_REQUIRE(is_ours(), "an I/O engine of process ", process_,
                   " was used in its forked child ", getpid());
  // declared first: it may close the file, after the lock is released
  std::shared_ptr<OpenFile> open;
  Lock lock(mutex_);
  INFINITY_REQUIRE(index >= 0 && index < static_cast<int>(files_.size()), "no file ", index);
  File& file = files_[index];
  if (file.descriptor < 0 || stopping_) return;  // dropped before, or closed by shut_down
  file.nbytes = 0;  // later transfers are outside the file
  file.descriptor = -1;
  backend_->forget_file(index);
  open = std::move(file.open);
  if (behind) open->close_behind();
}

std::vector<int> IoEngine::open_files() const {
  Lock lock(mutex_);
  std::vector<int> found;
  for (std::size_t i = 0; i < files_.size(); ++i)
    if (files_[i].descriptor >= 0) found.push_back(static_cast<int>(i));
  return found;
}

int IoEngine::add(File file) {
  if (std::string device = options_.layer ? options_.layer->device_of(file.path) : "";
      !device.empty())
    file.device = std::move(device);
  Lock lock(mutex_);
  file.queue = queue_of(file.device);
  if (!file.direct)
    notes_.push_back(file.path +
                     ": no O_DIRECT on this file system, reads go through the page cache");
  files_.push_back(std::move(file));
  return static_cast<int>(files_.size()) - 1;
}

// Returns the queue of a device, after it has made one, with slots, for a new device.
int IoEngine::queue_of(const std::string& device) {
  for (std::size_t i = 0; i < queues_.size(); ++i)
    if (queues_[i].device == device) return static_cast<int>(i);
  backend_->add_queue(device);
  queues_.emplace_back().device = device;
  const std::size_t count = std::min<std::size_t>(
      slots_.size() + options_.depth, std::max<std::size_t>(slots_.size(), kMaxInFlight));
  for (std::size_t id = count; id-- > slots_.size();)
    free_slots_.push_back(static_cast<std::uint32_t>(id));
  slots_.resize(count);
  return static_cast<int>(queues_.size()) - 1;
}

bool IoEngine::is_idle() const {
  const bool waiting = std::any_of(queues_.begin(), queues_.end(), [](const Queue& queue) {
    return !queue.awaited.empty() || !queue.others.empty();
  });
  return !waiting && dependent_ == 0 && worked_on_ == 0 && !completing_ &&
         free_slots_.size() + given_up_ == slots_.size();
}

bool IoEngine::register_files_and_buffers(const std::vector<Span>& buffers,
                                          std::vector<std::shared_ptr<const void>> owners,
                                          double seconds) {
  INFINITY_REQUIRE(is_ours(), "an I/O engine of process ", process_,
                   " was used in its forked child ", getpid());
  Lock lock(mutex_);
  const bool idle =
      idle_.wait_for(lock, std::chrono::duration<double>(seconds),
                     [this]() INFINITY_REQUIRES(mutex_) { return stopping_ || is_idle(); });
  INFINITY_REQUIRE(!stopping_, "this I/O engine was shut down");
  if (given_up_) {
    const auto hung =
        std::find_if(files_.begin(), files_.end(), [](const File& each) { return each.hung; });
    throw StorageError(ETIMEDOUT, hung == files_.end() ? "" : hung->path,
                       "the device is hung, so no other memory can be registered");
  }
  if (!idle) return false;
  std::vector<int> descriptors;
  for (const File& file : files_) descriptors.push_back(file.descriptor);
  for (std::string why :
       {backend_->register_files(descriptors), backend_->register_buffers(buffers)})
    if (!why.empty() && std::find(notes_.begin(), notes_.end(), why) == notes_.end())
      notes_.push_back(why);
  registered_.swap(owners);
  return true;
}

File IoEngine::file(int index) const {
  Lock lock(mutex_);
  INFINITY_REQUIRE(index >= 0 && index < static_cast<int>(files_.size()), "no file ", index);
  return files_[index];
}

std::string IoEngine::hung() const {
  Lock lock(mutex_);
  if (given_up_ == 0) return "";
  const auto file =
      std::find_if(files_.begin(), files_.end(), [](const File& each) { return each.hung; });
  return file == files_.end() ? files_.front().path : file->path;
}

IoTotals IoEngine::totals(Op op) const {
  Lock lock(mutex_);
  return meters_[static_cast<int>(op)].totals;
}

void IoEngine::check(const Request& request) const {
  INFINITY_REQUIRE(request.file >= 0 && request.file < static_cast<int>(files_.size()), "no file ",
                   request.file);
  INFINITY_REQUIRE(request.span.nbytes > 0 && request.span.nbytes % kBlockNbytes == 0 &&
                       request.offset % kBlockNbytes == 0 &&
                       is_aligned(request.span.data, kBlockNbytes),
                   verb(request.op), " of ", request.span.nbytes, " bytes at offset ",
                   request.offset, ", address ", static_cast<const void*>(request.span.data),
                   ": each must be a multiple of ", kBlockNbytes);
  const File& file = files_[request.file];
  INFINITY_REQUIRE(
      request.offset < file.nbytes && request.span.nbytes <= file.nbytes - request.offset,
      verb(request.op), " of ", request.span.nbytes, " bytes at offset ", request.offset, " of ",
      file.path, ", which has ", file.nbytes);
}

void IoEngine::validate(const Request& request) const {
  Lock lock(mutex_);
  check(request);
}

TicketPtr IoEngine::submit(const std::vector<Request>& requests, const TicketPtr& after,
                           Then then) {
  INFINITY_REQUIRE(is_ours(), "an I/O engine of process ", process_,
                   " was used in its forked child ", getpid());
  INFINITY_REQUIRE(!requests.empty(), "a submission without requests");
  std::size_t pieces = 0;
  bool is_bounded = true;
  for (const Request& request : requests) {
    pieces += (request.span.nbytes + options_.block_nbytes - 1) / options_.block_nbytes;
    is_bounded &= request.is_bounded;
  }
  auto ticket = std::make_shared<Ticket>(pieces);
  // not called once it is over, so this is still there
  ticket->on_hurry([this, after, raw = ticket.get()] {
    if (after) after->hurry();
    hurry(raw);
  });
  if (then)
    ticket->then([then = std::move(then), raw = ticket.get()] { then(raw->shared_from_this()); });
  {
    Lock lock(mutex_);
    INFINITY_REQUIRE(!stopping_, "this I/O engine was shut down");
    for (const Request& request : requests) check(request);
    INFINITY_REQUIRE(is_bounded || pieces + pieces_ <= options_.max_pieces, "a submission of ",
                     pieces, " pieces of ", options_.block_nbytes, " bytes beside ", pieces_,
                     " that are not over: this I/O engine takes ", options_.max_pieces,
                     " at most. Wait for earlier transfers before submitting more");
    pieces_ += pieces;
    if (after) ++dependent_;
  }
  if (!after) {
    enqueue(requests, ticket);
    return ticket;
  }
  after->on_done([this, requests, ticket, pieces](std::exception_ptr error) {
    if (error) {
      discharge(pieces);
      for (std::size_t i = 0; i < pieces; ++i) ticket->part_done(error);
    } else {
      ticket->begin();
      enqueue(requests, ticket);
    }
    Lock lock(mutex_);
    --dependent_;
    idle_.notify_all();
  });
  return ticket;
}

void IoEngine::enqueue(const std::vector<Request>& requests, const TicketPtr& ticket) {
  Finished finished;
  std::vector<std::shared_ptr<InFlight>> first;  // writes whose work is done before they start
  {
    Lock lock(mutex_);
    for (const Request& request : requests) {
      for (std::size_t at = 0; at < request.span.nbytes; at += options_.block_nbytes) {
        InFlight entry;
        const int queue = files_[request.file].queue;
        entry.piece = {request.op,
                       request.file,
                       queue,
                       request.offset + at,
                       request.span.data + at,
                       std::min(options_.block_nbytes, request.span.nbytes - at)};
        entry.ticket = ticket;
        entry.memory = request.memory;
        entry.work = request.work;
        entry.open = files_[request.file].open;
        if (!entry.open) {  // dropped since the submission
          finished.push_back(failed(entry));
          continue;
        }
        entry.whole = {entry.piece.data, entry.piece.nbytes};
        if (request.work && request.op == Op::kWrite) {
          first.push_back(std::make_shared<InFlight>(std::move(entry)));
          ++worked_on_;
        } else {
          queues_[queue].of(*ticket).push_back(std::move(entry));
        }
      }
    }
    if (ticket->cancelled()) fail_the_waiting(finished);
    start_waiting(finished);
  }
  end_parts(finished);
  for (auto& entry : first) queue_work(std::move(entry));
}

void IoEngine::queue_work(std::shared_ptr<InFlight> entry) {
  const bool awaited = entry->ticket->hurried();
  try {
    works_.add([this, entry] { work_on(*entry); }, awaited);
  } catch (...) {  // no memory for the job
    work_on(*entry);
  }
}

// Does the work of one piece. A read is over after it; a write joins the queue of its device.
void IoEngine::work_on(InFlight& entry) {
  const TicketPtr ticket = entry.ticket;
  const bool write = entry.piece.op == Op::kWrite;
  Finished finished;
  std::exception_ptr error;
  try {
    entry.work->look_at(entry.whole);
    entry.work.reset();
    if (write) {
      Lock lock(mutex_);
      queues_[entry.piece.queue].of(*ticket).push_back(std::move(entry));
      if (ticket->cancelled()) fail_the_waiting(finished);
      start_waiting(finished);
    }
  } catch (...) {
    error = std::current_exception();
  }
  end_parts(finished);
  if (!write || error) {
    entry.memory.reset();  // free before the ticket's waiter runs
    discharge(1);
    ticket->part_done(error);
  }
  Lock lock(mutex_);
  --worked_on_;
  idle_.notify_all();
}

// Moves the waiting pieces of `ticket` in front of those that no thread waits for.
void IoEngine::hurry(const Ticket* ticket) {
  Lock lock(mutex_);
  for (Queue& queue : queues_) {
    const auto moved = std::stable_partition(
        queue.others.begin(), queue.others.end(),
        [ticket](const InFlight& entry) { return entry.ticket.get() != ticket; });
    std::move(moved, queue.others.end(), std::back_inserter(queue.awaited));
    queue.others.erase(moved, queue.others.end());
  }
}

void IoEngine::cancel(const TicketPtr& ticket) {
  ticket->cancel();
  Finished finished;
  {
    Lock lock(mutex_);
    fail_the_waiting(finished);
  }
  end_parts(finished);
  idle_.notify_all();
}

// Ends the waiting pieces that must not start: cancelled, or on a hung device.
void IoEngine::fail_the_waiting(Finished& finished) {
  for (Queue& queue : queues_)
    for (auto* waiting : {&queue.awaited, &queue.others}) {
      const auto kept = std::stable_partition(
          waiting->begin(), waiting->end(), [&](const InFlight& entry) INFINITY_REQUIRES(mutex_) {
            return !entry.ticket->cancelled() && !files_[entry.piece.file].hung && !broken_;
          });
      for (auto entry = kept; entry != waiting->end(); ++entry) finished.push_back(failed(*entry));
      waiting->erase(kept, waiting->end());
    }
}

// The result of a piece that must not start.
IoEngine::Part IoEngine::failed(const InFlight& entry) const {
  const File& file = files_[entry.piece.file];
  if (broken_) return {entry.ticket, broken_};
  if (file.hung) return {entry.ticket, hung_error(entry.piece)};
  return {entry.ticket,
          std::make_exception_ptr(
              StorageError(ECANCELED, file.path, describe(entry.piece, file) + " was cancelled")),
          true};
}

// Starts waiting pieces in the free slots of every device.
void IoEngine::start_waiting(Finished& finished) {
  if (troubled_) fail_the_waiting(finished);
  try {
    bool started = false;
    for (Queue& queue : queues_)
      for (auto* waiting : {&queue.awaited, &queue.others})
        while (queue.in_flight < options_.depth && !free_slots_.empty() && !waiting->empty()) {
          const std::uint32_t id = free_slots_.back();
          free_slots_.pop_back();
          slots_[id] = std::move(waiting->front());
          waiting->pop_front();
          slots_[id].started = clock_;
          ++queue.in_flight;
          const Piece& piece = slots_[id].piece;
          count(piece.op, +1, 0);
          backend_->start(id, piece, slots_[id].open->descriptor());
          started = true;
        }
    if (started) backend_->flush();
  } catch (...) {
    break_down(std::current_exception(), finished);
  }
}

// Frees the slot of a piece that is over, for another one of its device.
void IoEngine::free_slot(std::uint32_t id) {
  --queues_[slots_[id].piece.queue].in_flight;
  slots_[id] = InFlight{};
  free_slots_.push_back(id);
}

// Gives everything up after the backend failed: it is unknown whether started pieces end, and none
// starts.
void IoEngine::break_down(const std::exception_ptr& error, Finished& finished) {
  if (!broken_) broken_ = error;
  troubled_ = true;
  for (std::uint32_t id = 0; id < slots_.size(); ++id)
    if (slots_[id].ticket) give_up(id, broken_, finished);
  fail_the_waiting(finished);
}

// Ends parts of tickets. Without the mutex: a ticket's callbacks may submit again.
void IoEngine::end_parts(Finished& finished) {
  if (finished.empty()) return;
  discharge(static_cast<std::size_t>(std::count_if(
      finished.begin(), finished.end(), [](const Part& part) { return !part.arrived; })));
  for (Part& part : finished) {
    if (part.arrived)
      queue_work(std::move(part.arrived));
    else
      end_part(part.ticket, part.error, part.cancelled);
  }
  finished.clear();
}

// Counts pieces as over. Called before their tickets finish, because a waiter may submit at once.
void IoEngine::discharge(std::size_t pieces) {
  Lock lock(mutex_);
  pieces_ -= pieces;
}

void IoEngine::run() {
  Finished finished;
  try {
    serve(finished);
  } catch (...) {
    {
      Lock lock(mutex_);
      break_down(std::current_exception(), finished);
    }
    end_parts(finished);
    Lock lock(mutex_);
    completing_ = false;
    idle_.notify_all();
  }
}

void IoEngine::serve(Finished& finished) {
  std::vector<PieceResult> results;
  auto last = std::chrono::steady_clock::now();
  for (;;) {
    results.clear();
    backend_->wait(results, tick());
    {
      Lock lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      clock_ += std::min(2 * tick(), std::chrono::duration<double>(now - last).count());
      last = now;
      for (const PieceResult& result : results) complete(result, finished);
      give_up_on_the_hung(finished);
      start_waiting(finished);
      if (stopping_) return;
      completing_ = !finished.empty();
    }
    if (!finished.empty()) {
      end_parts(finished);
      {
        Lock lock(mutex_);
        completing_ = false;
      }
      idle_.notify_all();
    }
  }
}

// Reads one result. Either the piece is over, and goes to `finished`, or its rest goes back to the
// queue.
void IoEngine::complete(const PieceResult& result, Finished& finished) {
  InFlight& entry = slots_[result.id];
  if (entry.given_up) {  // the device answered after the timeout
    --given_up_;
    entry = InFlight{};
    free_slots_.push_back(result.id);
    return;
  }
  Piece& piece = entry.piece;
  const File& file = files_[piece.file];
  std::exception_ptr error;
  bool again = false;
  const auto where = [&] { return describe(piece, file); };
  if (result.result == -EINTR || result.result == -EAGAIN) {
    again = ++entry.stalled < 1000;
    if (!again)
      error = std::make_exception_ptr(
          StorageError(static_cast<int>(-result.result), file.path, where()));
  } else if (result.result < 0) {
    error =
        std::make_exception_ptr(StorageError(static_cast<int>(-result.result), file.path, where()));
  } else if (static_cast<std::size_t>(result.result) < piece.nbytes) {
    // O_DIRECT continues at block boundaries, so a partial block counts as not moved.
    const std::size_t moved = round_down(static_cast<std::size_t>(result.result), kBlockNbytes);
    entry.stalled = moved ? 0 : entry.stalled + 1;
    count(piece.op, 0, moved);
    piece.offset += moved;
    piece.data += moved;
    piece.nbytes -= moved;
    again = result.result > 0 && entry.stalled < 8;
    if (!again && piece.op == Op::kRead)
      error = std::make_exception_ptr(CorruptionError(
          where() + ": the file ends there, but it was made longer: it was truncated"));
    else if (!again)
      error = std::make_exception_ptr(StorageError(EIO, file.path, where() + " moved nothing"));
  } else {
    count(piece.op, 0, piece.nbytes);
  }
  count(piece.op, -1, 0);
  if (again) {
    queues_[piece.queue].of(*entry.ticket).push_front(entry);
  } else if (entry.work && !error && piece.op == Op::kRead) {
    finished.push_back({nullptr, nullptr, false, std::make_shared<InFlight>(entry)});
    ++worked_on_;
  } else {
    finished.push_back({std::move(entry.ticket), error});
  }
  free_slot(result.id);
}

void IoEngine::give_up_on_the_hung(Finished& finished) {
  if (clock_ < next_look_) return;
  next_look_ = clock_ + tick();
  const std::vector<std::uint32_t> queued = backend_->queued();
  // it cannot reach the kernel earlier
  for (const std::uint32_t id : queued) slots_[id].started = next_look_;
  std::vector<std::uint32_t> late;
  for (std::uint32_t id = 0; id < slots_.size(); ++id)
    if (slots_[id].ticket && clock_ - slots_[id].started >= options_.timeout_seconds) {
      files_[slots_[id].piece.file].hung = true;
      late.push_back(id);
    }
  if (late.empty()) return;
  // First the queued pieces, which would hang too; then the late ones. Other pieces take their
  // slots.
  for (const std::uint32_t id : queued) {
    InFlight& entry = slots_[id];
    if (!files_[entry.piece.file].hung || !backend_->take_back(id)) continue;
    finished.push_back({std::move(entry.ticket), hung_error(entry.piece)});
    count(entry.piece.op, -1, 0);
    free_slot(id);
  }
  for (const std::uint32_t id : late) give_up(id, hung_error(slots_[id].piece), finished);
}

// Fails the ticket of a late piece. Its slot stays in use until the device answers; a new slot
// replaces it.
void IoEngine::give_up(std::uint32_t id, std::exception_ptr error, Finished& finished) {
  InFlight& entry = slots_[id];
  finished.push_back({std::move(entry.ticket), std::move(error)});
  entry.ticket = nullptr;
  count(entry.piece.op, -1, 0);
  entry.given_up = true;
  --queues_[entry.piece.queue].in_flight;
  backend_->give_up(id);
  ++given_up_;
  troubled_ = true;
  free_slots_.push_back(static_cast<std::uint32_t>(slots_.size()));
  slots_.emplace_back();
}

std::exception_ptr IoEngine::hung_error(const Piece& piece) const {
  const File& file = files_[piece.file];
  return std::make_exception_ptr(
      StorageError(ETIMEDOUT, file.path,
                   concat(describe(piece, file), ": device ", file.device, " has not answered for ",
                          options_.timeout_seconds,
                          " s. Look at the kernel's log (dmesg); resume from the last checkpoint "
                          "on another disk, or give it longer "
                          "with INFINITY_IO_TIMEOUT=<seconds>")));
}

void IoEngine::count(Op op, int change, std::size_t nbytes) {
  Meter& meter = meters_[static_cast<int>(op)];
  meter.totals.nbytes += nbytes;
  const auto now = std::chrono::steady_clock::now();
  if (meter.active > 0)
    meter.totals.busy_seconds += std::chrono::duration<double>(now - meter.since).count();
  meter.since = now;
  meter.active += change;
}

}  // namespace infinity
