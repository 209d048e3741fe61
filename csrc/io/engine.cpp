#include "io/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
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
  results_.reserve(kMaxInFlight);
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
    (void)held_.release();
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
  backend_->forget_file(index);
  file.nbytes = 0;  // later transfers are outside the file
  file.descriptor = -1;
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
  const std::size_t had = slots_.size(),
                    count = std::min<std::size_t>(had + options_.depth,
                                                  std::max<std::size_t>(had, kMaxInFlight));
  free_slots_.reserve(count);
  queues_.emplace_back();
  try {
    queues_.back().device = device;
    slots_.resize(count);
    backend_->add_queue(device);
  } catch (...) {  // or transfers of one device would go to another's queue
    slots_.resize(had);
    queues_.pop_back();
    throw;
  }
  for (std::size_t id = count; id-- > had;) free_slots_.push_back(static_cast<std::uint32_t>(id));
  usable_ += count - had;
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
  std::vector<std::shared_ptr<const void>> both = owners;  // declared here: freed without the lock
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
  // If this throws, it is unknown which of the two the kernel moves.
  both.insert(both.end(), registered_.begin(), registered_.end());
  registered_.swap(both);
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
  const auto made = std::make_shared<Pieces>();
  Ticket::Callbacks begin;
  if (after)
    begin.push_back([this, made, ticket](std::exception_ptr error) {
      if (!error) {
        ticket->begin();
      } else {
        for (InFlight& entry : *made) entry.error = error;
      }
      enqueue(*made);
      Lock lock(mutex_);
      --dependent_;
      idle_.notify_all();
    });
  {
    Lock lock(mutex_);
    INFINITY_REQUIRE(!stopping_, "this I/O engine was shut down");
    for (const Request& request : requests) check(request);
    INFINITY_REQUIRE(is_bounded || pieces + pieces_ <= options_.max_pieces, "a submission of ",
                     pieces, " pieces of ", options_.block_nbytes, " bytes beside ", pieces_,
                     " that are not over: this I/O engine takes ", options_.max_pieces,
                     " at most. Wait for earlier transfers before submitting more");
    for (const Request& request : requests)
      for (std::size_t at = 0; at < request.span.nbytes; at += options_.block_nbytes)
        made->push_back(
            {{request.op, request.file, files_[request.file].queue, request.offset + at,
              request.span.data + at, std::min(options_.block_nbytes, request.span.nbytes - at)},
             ticket,
             request.memory,
             request.work});
    pieces_ += pieces;  // nothing can fail from here on
    if (after) ++dependent_;
  }
  if (after)
    after->on_done(std::move(begin));
  else
    enqueue(*made);
  return ticket;
}

// Starts the pieces of a ticket, those that have no error.
void IoEngine::enqueue(Pieces& pieces) noexcept {
  Pieces finished;
  {
    Lock lock(mutex_);
    while (!pieces.empty()) {
      InFlight& entry = pieces.front();
      const File& file = files_[entry.piece.file];
      entry.open = file.open;
      entry.whole = {entry.piece.data, entry.piece.nbytes};
      // dropped since the submission
      if (!entry.error && (!entry.open || entry.ticket->cancelled())) fail(entry);
      entry.needs_work = !entry.error && entry.work && entry.piece.op == Op::kWrite;
      worked_on_ += entry.needs_work;  // before it starts
      Pieces& to =
          entry.error || entry.needs_work ? finished : queues_[file.queue].of(*entry.ticket);
      to.splice(to.end(), pieces, pieces.begin());
    }
    start_waiting(finished);
  }
  end_parts(finished);
}

// Has a thread do the work of the first of `pieces`, which leaves them.
void IoEngine::queue_work(Pieces& pieces) noexcept {
  const Pieces::iterator entry = pieces.begin();
  {
    Lock lock(mutex_);
    working_.splice(working_.end(), pieces, entry);
  }
  try {
    works_.add([this, entry] { work_on(entry); }, entry->ticket->hurried());
  } catch (...) {  // no memory for the job
    work_on(entry);
  }
}

// Does the work of one piece. A read is over after it; a write joins the queue of its device.
void IoEngine::work_on(Pieces::iterator entry) noexcept {
  try {
    entry->work->look_at(entry->whole);
  } catch (...) {
    entry->error = std::current_exception();
  }
  entry->work.reset();
  Pieces finished;
  {
    Lock lock(mutex_);
    entry->needs_work = false;
    const bool starts = entry->piece.op == Op::kWrite && !entry->error;
    Pieces& to = starts ? queues_[entry->piece.queue].of(*entry->ticket) : finished;
    to.splice(to.end(), working_, entry);
    if (starts) {
      if (entry->ticket->cancelled()) fail_the_waiting(finished);
      start_waiting(finished);
    }
  }
  end_parts(finished);
  Lock lock(mutex_);
  --worked_on_;
  idle_.notify_all();
}

// Moves the waiting pieces of `ticket` in front of those that no thread waits for.
void IoEngine::hurry(const Ticket* ticket) {
  Lock lock(mutex_);
  for (Queue& queue : queues_)
    for (auto entry = queue.others.begin(); entry != queue.others.end();) {
      const auto next = std::next(entry);
      if (entry->ticket.get() == ticket)
        queue.awaited.splice(queue.awaited.end(), queue.others, entry);
      entry = next;
    }
}

void IoEngine::cancel(const TicketPtr& ticket) {
  ticket->cancel();
  Pieces finished;
  {
    Lock lock(mutex_);
    fail_the_waiting(finished);
  }
  end_parts(finished);
  idle_.notify_all();
}

// Ends the waiting pieces that must not start: cancelled, or on a hung device.
void IoEngine::fail_the_waiting(Pieces& finished) noexcept {
  for (Queue& queue : queues_)
    for (auto* waiting : {&queue.awaited, &queue.others})
      for (auto entry = waiting->begin(); entry != waiting->end();) {
        const auto next = std::next(entry);
        if (entry->ticket->cancelled() || files_[entry->piece.file].hung || broken_) {
          fail(*entry);
          finished.splice(finished.end(), *waiting, entry);
        }
        entry = next;
      }
}

// Sets the error of a piece that must not start.
void IoEngine::fail(InFlight& entry) const noexcept {
  const File& file = files_[entry.piece.file];
  if (broken_) {
    entry.error = broken_;
  } else if (file.hung) {
    entry.error = hung_error(entry.piece);
  } else {
    entry.cancelled = true;
    entry.error = made_error([&] {
      return StorageError(ECANCELED, file.path, describe(entry.piece, file) + " was cancelled");
    });
  }
}

// Starts waiting pieces in the free slots of every device.
void IoEngine::start_waiting(Pieces& finished) noexcept {
  if (troubled_) fail_the_waiting(finished);
  try {
    for (Queue& queue : queues_)
      for (auto* waiting : {&queue.awaited, &queue.others})
        while (queue.in_flight < options_.depth && !free_slots_.empty() && !waiting->empty()) {
          const std::uint32_t id = free_slots_.back();
          free_slots_.pop_back();
          Pieces& slot = slots_[id].piece;
          slot.splice(slot.begin(), *waiting, waiting->begin());
          InFlight& entry = slot.front();
          entry.started = clock_;
          ++queue.in_flight;
          count(entry.piece.op, +1, 0);
          try {
            backend_->start(id, entry.piece, entry.open->descriptor());
          } catch (const std::bad_alloc&) {  // it alone fails
            entry.error = std::current_exception();
            count(entry.piece.op, -1, 0);
            take_from_slot(id, finished);
          }
        }
    backend_->flush();
  } catch (...) {
    break_down(std::current_exception(), finished);
  }
}

// Moves a piece behind `to`, and frees its slot for another one of its device.
void IoEngine::take_from_slot(std::uint32_t id, Pieces& to) noexcept {
  Pieces& slot = slots_[id].piece;
  --queues_[slot.front().piece.queue].in_flight;
  to.splice(to.end(), slot);
  free_slots_.push_back(id);
}

// Gives everything up after the backend failed: it is unknown whether started pieces end, and none
// starts.
void IoEngine::break_down(const std::exception_ptr& error, Pieces& finished) noexcept {
  if (!broken_) broken_ = error;
  troubled_ = true;
  for (std::uint32_t id = 0; id < slots_.size(); ++id)
    if (!slots_[id].piece.empty()) give_up(id, broken_, finished);
  fail_the_waiting(finished);
}

// Ends pieces, and has the work of others done. Without the mutex: a ticket's callbacks may submit
// again.
void IoEngine::end_parts(Pieces& finished) noexcept {
  if (finished.empty()) return;
  {
    Lock lock(mutex_);  // before their tickets finish, because a waiter may submit at once
    for (const InFlight& entry : finished) pieces_ -= !entry.needs_work;
  }
  while (!finished.empty()) {
    if (finished.front().needs_work) {
      queue_work(finished);
      continue;
    }
    const TicketPtr ticket = std::move(finished.front().ticket);
    const std::exception_ptr error = std::move(finished.front().error);
    const bool cancelled = finished.front().cancelled;
    finished.pop_front();  // its memory is free before the ticket's waiter runs
    if (cancelled)
      ticket->part_cancelled(error);
    else
      ticket->part_done(error);
  }
}

void IoEngine::run() {
  Pieces finished;
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

void IoEngine::serve(Pieces& finished) {
  auto last = std::chrono::steady_clock::now();
  for (;;) {
    results_.clear();
    try {
      backend_->wait(results_, tick());
    } catch (const std::bad_alloc&) {  // the other results come next
    }
    {
      Lock lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      clock_ += std::min(2 * tick(), std::chrono::duration<double>(now - last).count());
      last = now;
      for (const PieceResult& result : results_) complete(result, finished);
      try {
        give_up_on_the_hung(finished);
      } catch (const std::bad_alloc&) {  // at the next look
      }
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
void IoEngine::complete(const PieceResult& result, Pieces& finished) noexcept {
  Slot& slot = slots_[result.id];
  if (slot.given_up) {  // the device answered after the timeout
    --given_up_;
    slot = Slot{};
    free_slots_.push_back(result.id);
    return;
  }
  InFlight& entry = slot.piece.front();
  Piece& piece = entry.piece;
  const File& file = files_[piece.file];
  const auto storage_error = [&](std::int64_t number, const char* what = "") {
    return made_error([&] {
      return StorageError(static_cast<int>(number), file.path, describe(piece, file) + what);
    });
  };
  bool again = false;
  if (result.result == -EINTR || result.result == -EAGAIN) {
    again = ++entry.stalled < 1000;
    if (!again) entry.error = storage_error(-result.result);
  } else if (result.result < 0) {
    entry.error = storage_error(-result.result);
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
      entry.error = made_error([&] {
        return CorruptionError(describe(piece, file) +
                               ": the file ends there, but it was made longer: it was truncated");
      });
    else if (!again)
      entry.error = storage_error(EIO, " moved nothing");
  } else {
    count(piece.op, 0, piece.nbytes);
  }
  count(piece.op, -1, 0);
  if (again) {
    Pieces rest;
    take_from_slot(result.id, rest);
    Pieces& waiting = queues_[piece.queue].of(*entry.ticket);
    waiting.splice(waiting.begin(), rest);
    return;
  }
  entry.needs_work = entry.work && !entry.error && piece.op == Op::kRead;
  worked_on_ += entry.needs_work;
  take_from_slot(result.id, finished);
}

void IoEngine::give_up_on_the_hung(Pieces& finished) {
  if (clock_ < next_look_) return;
  next_look_ = clock_ + tick();
  replace_given_up();
  std::vector<std::uint32_t> queued = backend_->queued();
  queued.erase(std::remove_if(queued.begin(), queued.end(),
                              [this](std::uint32_t id)
                                  INFINITY_REQUIRES(mutex_) { return slots_[id].piece.empty(); }),
               queued.end());
  // it cannot reach the kernel earlier
  for (const std::uint32_t id : queued) slots_[id].piece.front().started = next_look_;
  std::vector<std::uint32_t> late;
  for (std::uint32_t id = 0; id < slots_.size(); ++id) {
    if (slots_[id].piece.empty()) continue;
    const InFlight& entry = slots_[id].piece.front();
    if (clock_ - entry.started < options_.timeout_seconds) continue;
    late.push_back(id);
    files_[entry.piece.file].hung = true;
  }
  if (late.empty()) return;
  // First the queued pieces, which would hang too; then the late ones. Other pieces take their
  // slots.
  for (const std::uint32_t id : queued) {
    InFlight& entry = slots_[id].piece.front();
    if (!files_[entry.piece.file].hung || !backend_->take_back(id)) continue;
    entry.error = hung_error(entry.piece);
    count(entry.piece.op, -1, 0);
    take_from_slot(id, finished);
  }
  for (const std::uint32_t id : late)
    give_up(id, hung_error(slots_[id].piece.front().piece), finished);
  replace_given_up();
}

// Fails the ticket of a late piece. Its slot stays in use until the device answers.
void IoEngine::give_up(std::uint32_t id, std::exception_ptr error, Pieces& finished) noexcept {
  Slot& slot = slots_[id];
  InFlight& entry = slot.piece.front();
  entry.error = std::move(error);
  count(entry.piece.op, -1, 0);
  slot.memory = std::move(entry.memory);
  slot.open = std::move(entry.open);
  slot.given_up = true;
  --queues_[entry.piece.queue].in_flight;
  finished.splice(finished.end(), slot.piece);
  backend_->give_up(id);
  ++given_up_;
  troubled_ = true;
}

// Makes a slot for each one that waits for a hung device.
void IoEngine::replace_given_up() {
  while (slots_.size() - given_up_ < usable_) {
    free_slots_.reserve(slots_.size() + 1);
    results_.reserve(slots_.size() + 1);
    slots_.emplace_back();
    free_slots_.push_back(static_cast<std::uint32_t>(slots_.size()) - 1);
  }
}

std::exception_ptr IoEngine::hung_error(const Piece& piece) const noexcept {
  return made_error([&, &file = files_[piece.file]] {
    return StorageError(
        ETIMEDOUT, file.path,
        concat(describe(piece, file), ": device ", file.device, " has not answered for ",
               options_.timeout_seconds,
               " s. Look at the kernel's log (dmesg); resume from the last checkpoint "
               "on another disk, or give it longer "
               "with INFINITY_IO_TIMEOUT=<seconds>"));
  });
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
