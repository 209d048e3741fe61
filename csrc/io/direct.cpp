#include "io/direct.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <new>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/thread_safety.h"

namespace infinity {
namespace {

std::string reason(std::int64_t result) {
  const int error = static_cast<int>(-result);
  return error > Road::kRoadError ? concat("error ", error) : std::string(std::strerror(error));
}

constexpr const char* kChanged = "changed";
using Landings = std::list<LandingPtr>;

}  // namespace

// The state that the threads share. A stuck thread keeps it after the reader is gone.
struct DirectReader::State {
  State(IoEngine* io, std::shared_ptr<Road> to, DeviceCalls made, DirectOptions chosen)
      : engine(io),
        road(std::move(to)),
        calls(made),
        options(chosen),
        nothing_came(concat("nothing came in ", chosen.late_seconds, " s")) {}
  ~State() {
    if (road) road->close();
    for (const int descriptor : descriptors) close(descriptor);
  }

  IoEngine* const engine;  // the reader's: valid while a landing is open
  const std::shared_ptr<Road> road;
  const DeviceCalls calls;
  const DirectOptions options;
  const std::string nothing_came;

  mutable Mutex mutex;
  std::condition_variable work, changed;
  Mutex opening;  // held while the road opens a file, which takes long
  // Lists, because a landing that moves on must not need memory.
  Landings waiting INFINITY_GUARDED_BY(mutex);  // for a thread; awaited ones first
  Landings running INFINITY_GUARDED_BY(mutex);
  std::map<int, Way> ways INFINITY_GUARDED_BY(mutex);  // by file
  // the road's own: stuck reads outlive the engine's
  std::vector<int> descriptors INFINITY_GUARDED_BY(mutex);
  std::map<std::string, Refusals> refused INFINITY_GUARDED_BY(mutex);
  std::map<const Landing*, Stuck> stuck INFINITY_GUARDED_BY(mutex);
  std::uint64_t nbytes INFINITY_GUARDED_BY(mutex) = 0;
  // when the road last ended a read
  Clock::time_point returned INFINITY_GUARDED_BY(mutex) = Clock::now();
  // By piece: the turn of its next read.
  std::map<std::pair<const Extent*, std::size_t>, std::size_t> turns INFINITY_GUARDED_BY(mutex);
  std::size_t open INFINITY_GUARDED_BY(mutex) = 0;  // landings that have not ended
  int threads INFINITY_GUARDED_BY(mutex) = 0;  // that serve
  bool stopping INFINITY_GUARDED_BY(mutex) = false;

  bool start_thread(const std::shared_ptr<State>& state) noexcept INFINITY_REQUIRES(mutex);
  bool copy_file(const Landing& landing, int file, File* copy) const INFINITY_EXCLUDES(mutex);
  Way way_to(const Landing& landing, int file, std::string* said) INFINITY_EXCLUDES(mutex, opening);
  const char* take_road(const LandingPtr& landing, std::string* said) INFINITY_EXCLUDES(mutex);
  Span part_to_verify(const Landing& landing) INFINITY_EXCLUDES(mutex);
  int take_sums(Span device, std::uint32_t* sums) const;
  void note(const Landing& landing, const char* word, const std::string& said) noexcept
      INFINITY_REQUIRES(mutex);
  void close_way(int file, bool at_once) noexcept INFINITY_REQUIRES(mutex);
  const char* why_not(const Landing& landing, std::string* said) INFINITY_EXCLUDES(mutex);
};

DirectReader::DirectReader(std::shared_ptr<IoEngine> engine, std::shared_ptr<Road> road,
                           DeviceCalls calls, const DirectOptions& options)
    : engine_(std::move(engine)),
      state_(std::make_shared<State>(engine_.get(), std::move(road), calls, options)) {
  INFINITY_REQUIRE(options.threads >= 1, "a direct reader needs at least one thread, not ",
                   options.threads);
  INFINITY_REQUIRE(options.late_seconds > 0, "a read that is late after ", options.late_seconds,
                   " seconds");
  INFINITY_REQUIRE(engine_, "a direct reader needs an I/O engine");
  INFINITY_REQUIRE(options.sampled >= 0, "a sample of one in ", options.sampled);
  const bool verifies = state_->calls.checksums || (options.sampled > 0 && state_->calls.copy_out);
  INFINITY_REQUIRE(!state_->road || !options.checksums || verifies,
                   "a road to a device that cannot verify what it brings");
  const Lock lock(state_->mutex);
  try {
    watcher_ = std::thread([state = state_] { watch(state); });
  } catch (const std::system_error& error) {
    throw StorageError(error.code().value(), "",
                       "the system refuses a thread for direct reads (a limit on processes: "
                       "`ulimit -u`, or the container's pids)");
  }
  for (int i = 0; state_->road && i < options.threads && state_->start_thread(state_); ++i) {
  }
}

DirectReader::~DirectReader() { shut_down(); }

void DirectReader::shut_down() {
  {
    Lock lock(state_->mutex);
    if (state_->stopping) return;
    state_->changed.wait(lock,
                         [this]() INFINITY_REQUIRES(state_->mutex) { return state_->open == 0; });
    state_->stopping = true;
    state_->work.notify_all();
    state_->changed.notify_all();
    // Stuck threads go on, and keep what they use.
    state_->changed.wait(lock, [this]() INFINITY_REQUIRES(state_->mutex) {
      return state_->threads == static_cast<int>(state_->stuck.size());
    });
  }
  watcher_.join();
  if (state_->road && stuck() == 0) state_->road->close();
}

// Serving threads are counted, not joined, because one may be stuck.
bool DirectReader::State::start_thread(const std::shared_ptr<State>& state) noexcept {
  try {
    std::thread([state] { serve(state); }).detach();
  } catch (...) {  // the system has none, or no memory for one
    return false;
  }
  ++threads;
  return true;
}

LandingPtr DirectReader::read(const std::shared_ptr<const Extent>& extent, std::size_t at,
                              Span host, std::byte* device, const TicketPtr& after,
                              const std::shared_ptr<void>& memory) {
  INFINITY_REQUIRE(is_ours(), "a direct reader of process ", process_,
                   " was used in its forked child ", getpid());
  INFINITY_REQUIRE(extent, "a direct read of no extent");
  auto landing = std::make_shared<Landing>();
  landing->extent_ = extent;
  landing->at_ = at;
  landing->host_ = host;
  landing->device_ = device;
  landing->memory_ = memory;
  landing->requests_ = extent->requests(Op::kRead, at, host);
  for (const Request& each : landing->requests_) engine_->validate(each);
  landing->ticket_ = std::make_shared<Ticket>(1);
  const Extent::Expected known =
      extent->expected(at, host.nbytes, *engine_, extent->settled(at, host.nbytes, after));
  landing->wrote_ = known.sums;
  // not called once it is over, so it is still there
  landing->ticket_->on_hurry([state = state_, before = known.ticket, raw = landing.get()] {
    if (before) before->hurry();
    TicketPtr bounced;
    {
      const Lock lock(state->mutex);
      auto& waiting = state->waiting;
      const auto found = std::find_if(waiting.begin(), waiting.end(),
                                      [raw](const LandingPtr& each) { return each.get() == raw; });
      if (found != waiting.end()) waiting.splice(waiting.begin(), waiting, found);
      bounced = raw->bounced_;
    }
    if (bounced) bounced->hurry();
  });
  const auto begin = [state = state_, landing](std::exception_ptr error) {
    if (error) return end(*state, landing, error);
    if (landing->ticket_->cancelled())
      return end(*state, landing, cancelled_error(*state, *landing));
    landing->ticket_->begin();
    try {
      std::string said;
      if (const char* word = state->why_not(*landing, &said))
        return bounce(state, landing, word, said);
      Landings one{landing};
      const Lock lock(state->mutex);
      landing->stage_ = Landing::Stage::kWaiting;
      landing->since_ = Clock::now();
      auto& waiting = state->waiting;
      waiting.splice(landing->ticket_->hurried() ? waiting.begin() : waiting.end(), one);
      state->work.notify_one();
    } catch (...) {  // no memory
      end(*state, landing, std::current_exception());
    }
  };
  Ticket::Callbacks follow;
  if (known.ticket) follow.push_back(begin);
  {
    const Lock lock(state_->mutex);
    INFINITY_REQUIRE(!state_->stopping, "this direct reader was shut down");
    ++state_->open;  // nothing can fail from here on
  }
  if (known.ticket)
    known.ticket->on_done(std::move(follow));
  else
    begin(nullptr);
  return landing;
}

// Returns the refusal that is known before the road is used; null if there is none.
const char* DirectReader::State::why_not(const Landing& landing, std::string* said) {
  if (!landing.extent_->written(landing.at_, landing.host_.nbytes, landing.wrote_))
    return "unwritten";
  const Lock lock(mutex);
  if (!road || threads == 0) return "closed";
  for (const Request& each : landing.requests_) {
    const auto way = ways.find(each.file);
    if (way != ways.end() && way->second.closed) return "closed";
    const std::byte* device = landing.device_ + (each.span.data - landing.host_.data);
    if (!is_aligned(device, kBlockNbytes)) {
      *said = concat("address ", static_cast<const void*>(device),
                     " of the device is not a multiple of ", kBlockNbytes);
      return "misaligned";
    }
  }
  return nullptr;
}

std::exception_ptr DirectReader::cancelled_error(const State& state,
                                                 const Landing& landing) noexcept {
  return made_error([&] {
    const std::string path = state.engine->file(landing.requests_.front().file).path;
    return StorageError(ECANCELED, path, concat("a direct read of ", path, " was cancelled"));
  });
}

void DirectReader::cancel(const LandingPtr& landing) {
  landing->ticket_->cancel();
  TicketPtr bounced;
  bool is_waiting = false;
  {
    const Lock lock(state_->mutex);
    auto& waiting = state_->waiting;
    const auto found = std::find(waiting.begin(), waiting.end(), landing);
    if ((is_waiting = found != waiting.end())) waiting.erase(found);
    bounced = landing->bounced_;
  }
  if (is_waiting) end(*state_, landing, cancelled_error(*state_, *landing));
  if (bounced) engine_->cancel(bounced);
}

// Ends the landing. Without the mutex: its ticket's callbacks may read again.
void DirectReader::end(State& state, const LandingPtr& landing, std::exception_ptr error) noexcept {
  std::shared_ptr<void> memory;
  {
    const Lock lock(state.mutex);
    landing->stage_ = Landing::Stage::kOver;
    memory.swap(landing->memory_);
  }
  memory.reset();
  const bool cancelled = landing->ticket_->cancelled();
  if (error && cancelled)
    landing->ticket_->part_cancelled(error);
  else
    landing->ticket_->part_done(error);
  const Lock lock(state.mutex);
  --state.open;
  state.changed.notify_all();
}

// Counts a refusal.
void DirectReader::State::note(const Landing& landing, const char* word,
                               const std::string& said) noexcept {
  try {
    Refusals& counted = refused[word];
    if (counted.count++ != 0) return;
    const Request& first = landing.requests_.front();
    counted.first = concat("read of ", landing.host_.nbytes, " bytes at offset ", first.offset,
                           " of ", engine->file(first.file).path, said.empty() ? "" : ": ", said);
  } catch (const std::bad_alloc&) {  // it is counted, or not; no landing waits for that
  }
}

// Closes the way to a file: at once, or after too many failures in a row.
void DirectReader::State::close_way(int file, bool at_once) noexcept {
  try {
    Way& way = ways[file];
    way.closed |= at_once || ++way.failures >= kMostFailures;
  } catch (const std::bad_alloc&) {  // nothing has come by a way that is not there yet
  }
}

// Reads the whole landing by the I/O engine, into host memory.
void DirectReader::bounce(const std::shared_ptr<State>& state, const LandingPtr& landing,
                          const char* word, const std::string& said) noexcept {
  std::shared_ptr<void> memory;
  {
    const Lock lock(state->mutex);
    landing->stage_ = Landing::Stage::kBounced;
    memory = landing->memory_;
    state->note(*landing, word, said);
  }
  try {
    Ticket::Callbacks follow;
    follow.push_back([state, landing](std::exception_ptr error) { end(*state, landing, error); });
    const TicketPtr bounced = landing->extent_->read(*state->engine, landing->at_, landing->host_,
                                                     nullptr, memory, state->options.checksums);
    {
      const Lock lock(state->mutex);
      landing->bounced_ = bounced;
    }
    if (landing->ticket_->hurried()) bounced->hurry();
    if (landing->ticket_->cancelled()) state->engine->cancel(bounced);
    bounced->on_done(std::move(follow));
  } catch (...) {
    end(*state, landing, std::current_exception());
  }
}

void DirectReader::serve(const std::shared_ptr<State>& state) {
  const int refused = state->calls.enter ? state->calls.enter(state->options.device) : 0;
  Lock lock(state->mutex);
  for (;;) {
    state->work.wait(lock, [&]() INFINITY_REQUIRES(state->mutex) {
      return state->stopping || !state->waiting.empty();
    });
    if (state->waiting.empty()) break;
    const LandingPtr landing = state->waiting.front();
    state->running.splice(state->running.end(), state->waiting, state->waiting.begin());
    landing->stage_ = Landing::Stage::kRunning;
    landing->since_ = Clock::now();
    // until the road has returned, whatever becomes of the landing
    std::shared_ptr<void> memory = landing->memory_;
    lock.unlock();
    std::string said;
    const char* word = "refused";  // null: it has landed
    try {
      if (refused)
        said = concat("the device cannot be used (CUDA error ", refused, ")");
      else
        word = state->take_road(landing, &said);
    } catch (const std::exception&) {
      said = "no memory";
    }
    lock.lock();
    state->running.remove(landing);
    // it was given up, and another thread took this one's place
    if (state->stuck.erase(landing.get())) {
      lock.unlock();
      memory.reset();
      lock.lock();
      break;
    }
    state->returned = Clock::now();
    for (const Request& each : landing->requests_)
      if (word)
        state->close_way(each.file, word == kChanged);
      else
        state->ways.find(each.file)->second.failures = 0;
    if (!word) {
      landing->on_device_ = true;
      state->nbytes += landing->host_.nbytes;
    }
    lock.unlock();
    memory.reset();
    if (word)
      bounce(state, landing, word, said);
    else
      end(*state, landing, nullptr);
    lock.lock();
  }
  --state->threads;
  state->changed.notify_all();
}

// Copies the engine's entry of `file`. Returns false if the landing was given up: the engine may be
// gone.
bool DirectReader::State::copy_file(const Landing& landing, int file, File* copy) const {
  const Lock lock(mutex);
  if (landing.stage_ != Landing::Stage::kRunning) return false;
  *copy = engine->file(file);
  return true;
}

// The way to a file, which is opened at its first use. If the road refuses, the way is closed, and
// `said` is the reason.
DirectReader::Way DirectReader::State::way_to(const Landing& landing, int file, std::string* said) {
  const Lock one_at_a_time(opening);
  Way* way;
  {
    const Lock lock(mutex);
    way = &ways[file];
    if (way->is_opened) return *way;
  }
  File own;  // a copy, which keeps the descriptor valid here
  if (!copy_file(landing, file, &own)) {
    *said = "it was given up";
    return {nullptr, false, 0, true};
  }
  {
    const Lock lock(mutex);
    descriptors.reserve(descriptors.size() + 1);  // one thread at a time is here
  }
  own.descriptor = fcntl(own.descriptor, F_DUPFD_CLOEXEC, 0);
  void* handle = nullptr;
  if (own.descriptor < 0) {
    *said = std::strerror(errno);
  } else {
    {
      const Lock lock(mutex);
      descriptors.push_back(own.descriptor);
    }
    handle = road->open(own, said);
  }
  const Lock lock(mutex);
  way->handle = handle;
  way->is_opened = true;
  way->closed |= handle == nullptr;
  return *way;
}

// Reads and verifies by the road. Returns null, or the refusal.
const char* DirectReader::State::take_road(const LandingPtr& landing, std::string* said) {
  for (const Request& each : landing->requests_) {
    const Way way = way_to(*landing, each.file, said);
    if (way.closed) return said->empty() ? "closed" : "refused";
    std::byte* device = landing->device_ + (each.span.data - landing->host_.data);
    const std::int64_t moved = road->read(way.handle, device, each.span.nbytes, each.offset);
    if (moved < 0) {
      *said = reason(moved);
      return moved == -EINVAL ? "misaligned" : "refused";
    }
    if (static_cast<std::size_t>(moved) != each.span.nbytes) {
      *said = concat(moved, " of ", each.span.nbytes, " bytes came");
      return "short";
    }
  }
  {  // a landing that was given up must not use its extent, which may be written again
    const Lock lock(mutex);
    if (landing->stage_ != Landing::Stage::kRunning) return "late";
  }
  if (!options.checksums) return nullptr;
  const Span part = part_to_verify(*landing);
  if (part.nbytes == 0) return nullptr;
  std::vector<std::uint32_t> sums(checksum_count(part.nbytes));
  if (const int error = take_sums(part, sums.data())) {
    *said = concat("it cannot be verified (CUDA error ", error, ")");
    return "refused";
  }
  const Lock lock(mutex);
  if (landing->stage_ != Landing::Stage::kRunning) return "late";
  try {
    landing->extent_->compare(landing->at_ + static_cast<std::size_t>(part.data - landing->device_),
                              sums, landing->wrote_, landing->at_, *engine);
  } catch (const CorruptionError& error) {
    *said = error.what();
    return kChanged;
  }
  return nullptr;
}

// The part of the landing to verify, on the device: all of it, or the part whose turn it is. Pieces
// start at different turns, so that every pass over many pieces verifies the same number of bytes.
Span DirectReader::State::part_to_verify(const Landing& landing) {
  const std::size_t nbytes = landing.host_.nbytes;
  if (calls.checksums) return {landing.device_, nbytes};
  const std::size_t blocks = checksum_count(nbytes),
                    turns_of_all = static_cast<std::size_t>(options.sampled);
  std::size_t turn;
  {
    const Lock lock(mutex);
    turn = turns.try_emplace({landing.extent_.get(), landing.at_}, turns.size()).first->second++ %
           turns_of_all;
  }
  const std::size_t begin = blocks * turn / turns_of_all * kChecksumNbytes,
                    end = blocks * (turn + 1) / turns_of_all * kChecksumNbytes;
  return {landing.device_ + begin, std::min(end, nbytes) - std::min(begin, nbytes)};
}

// Computes the checksums. Returns 0, or the device's error. It does not copy into the landing's own
// host memory: if the landing was given up meanwhile, the bounce reads into that.
int DirectReader::State::take_sums(Span device, std::uint32_t* sums) const {
  if (calls.checksums) return calls.checksums(device.data, device.nbytes, sums);
  std::vector<std::byte> block(std::min(device.nbytes, kChecksumNbytes));
  for (std::size_t at = 0; at < device.nbytes; at += kChecksumNbytes) {
    const std::size_t nbytes = std::min(device.nbytes - at, kChecksumNbytes);
    if (const int error = calls.copy_out(block.data(), device.data + at, nbytes)) return error;
    crc32c_blocks(block.data(), nbytes, sums++);
  }
  return 0;
}

// Gives up late landings.
void DirectReader::watch(const std::shared_ptr<State>& state) {
  const auto tick = std::chrono::duration<double>(std::min(1.0, state->options.late_seconds / 4));
  Lock lock(state->mutex);
  while (!state->stopping) {
    state->changed.wait_for(lock, tick,
                            [&]() INFINITY_REQUIRES(state->mutex) { return state->stopping; });
    Landings late;
    const auto limit =
        Clock::now() - std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(state->options.late_seconds));
    try {
      for (const LandingPtr& landing : state->running)
        if (landing->stage_ == Landing::Stage::kRunning && landing->since_ < limit) {
          Landings one{landing};
          const std::string path = state->engine->file(landing->requests_.front().file).path;
          state->stuck[landing.get()] = {path, Clock::now()};
          late.splice(late.end(), one);
          state->start_thread(state);
        }
    } catch (const std::bad_alloc&) {  // at the next tick
    }
    // A waiting landing is late only if the road has ended no other read meanwhile.
    for (auto each = state->waiting.begin(); each != state->waiting.end();) {
      const auto next = std::next(each);
      if (std::max((*each)->since_, state->returned) < limit)
        late.splice(late.end(), state->waiting, each);
      each = next;
    }
    for (const LandingPtr& landing : late) {
      landing->stage_ = Landing::Stage::kBounced;
      for (const Request& each : landing->requests_) state->close_way(each.file, true);
    }
    lock.unlock();
    for (const LandingPtr& landing : late) bounce(state, landing, "late", state->nothing_came);
    late.clear();
    lock.lock();
  }
}

std::uint64_t DirectReader::nbytes() const {
  const Lock lock(state_->mutex);
  return state_->nbytes;
}

std::map<std::string, Refusals> DirectReader::refused() const {
  const Lock lock(state_->mutex);
  return state_->refused;
}

std::size_t DirectReader::stuck() const {
  const Lock lock(state_->mutex);
  return state_->stuck.size();
}

std::string DirectReader::hung() const {
  const Lock lock(state_->mutex);
  for (const auto& [landing, stuck] : state_->stuck)
    if (std::chrono::duration<double>(Clock::now() - stuck.since).count() >=
        state_->options.hung_seconds - state_->options.late_seconds)
      return stuck.path;
  return "";
}

}  // namespace infinity
