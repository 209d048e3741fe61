#include "io/direct.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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

}  // namespace

// The state that the threads share. A stuck thread keeps it after the reader is gone.
struct DirectReader::State {
  State(IoEngine* io, std::shared_ptr<Road> to, DeviceCalls made, DirectOptions chosen)
      : engine(io), road(std::move(to)), calls(made), options(chosen) {}
  ~State() {
    if (road) road->close();
    for (const int descriptor : descriptors) close(descriptor);
  }

  IoEngine* const engine;  // the reader's: valid while a landing is open
  const std::shared_ptr<Road> road;
  const DeviceCalls calls;
  const DirectOptions options;

  mutable Mutex mutex;
  std::condition_variable work, changed;
  Mutex opening;  // held while the road opens a file, which takes long
  std::deque<LandingPtr> waiting INFINITY_GUARDED_BY(mutex);  // for a thread; awaited ones first
  std::vector<LandingPtr> running INFINITY_GUARDED_BY(mutex);
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

  bool start_thread(const std::shared_ptr<State>& state) INFINITY_REQUIRES(mutex);
  bool copy_file(const Landing& landing, int file, File* copy) const INFINITY_EXCLUDES(mutex);
  Way way_to(const Landing& landing, int file, std::string* said) INFINITY_EXCLUDES(mutex, opening);
  std::string take_road(const LandingPtr& landing, std::string* said) INFINITY_EXCLUDES(mutex);
  Span part_to_verify(const Landing& landing) INFINITY_EXCLUDES(mutex);
  int take_sums(Span device, std::uint32_t* sums) const;
  void note(const Landing& landing, const char* word, const std::string& said)
      INFINITY_REQUIRES(mutex);
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
bool DirectReader::State::start_thread(const std::shared_ptr<State>& state) {
  try {
    std::thread([state] { serve(state); }).detach();
  } catch (const std::system_error&) {
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
  {
    const Lock lock(state_->mutex);
    INFINITY_REQUIRE(!state_->stopping, "this direct reader was shut down");
    ++state_->open;
  }
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
      if (found != waiting.end()) std::rotate(waiting.begin(), found, found + 1);
      bounced = raw->bounced_;
    }
    if (bounced) bounced->hurry();
  });
  const auto begin = [state = state_, landing](std::exception_ptr error) {
    if (error) return end(*state, landing, error);
    if (landing->ticket_->cancelled())
      return end(*state, landing, cancelled_error(*state, *landing));
    landing->ticket_->begin();
    std::string said;
    if (const char* word = state->why_not(*landing, &said))
      return bounce(state, landing, word, said);
    const Lock lock(state->mutex);
    landing->stage_ = Landing::Stage::kWaiting;
    landing->since_ = Clock::now();
    if (landing->ticket_->hurried())
      state->waiting.push_front(landing);
    else
      state->waiting.push_back(landing);
    state->work.notify_one();
  };
  if (known.ticket)
    known.ticket->on_done(begin);
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

std::exception_ptr DirectReader::cancelled_error(const State& state, const Landing& landing) {
  const std::string path = state.engine->file(landing.requests_.front().file).path;
  return std::make_exception_ptr(
      StorageError(ECANCELED, path, concat("a direct read of ", path, " was cancelled")));
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
void DirectReader::end(State& state, const LandingPtr& landing, std::exception_ptr error) {
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
void DirectReader::State::note(const Landing& landing, const char* word, const std::string& said) {
  Refusals& counted = refused[word];
  if (counted.count++ != 0) return;
  const Request& first = landing.requests_.front();
  counted.first = concat("read of ", landing.host_.nbytes, " bytes at offset ", first.offset,
                         " of ", engine->file(first.file).path, said.empty() ? "" : ": ", said);
}

// Reads the whole landing by the I/O engine, into host memory.
void DirectReader::bounce(const std::shared_ptr<State>& state, const LandingPtr& landing,
                          const char* word, const std::string& said) {
  std::shared_ptr<void> memory;
  {
    const Lock lock(state->mutex);
    landing->stage_ = Landing::Stage::kBounced;
    memory = landing->memory_;
    state->note(*landing, word, said);
  }
  try {
    const TicketPtr bounced = landing->extent_->read(*state->engine, landing->at_, landing->host_,
                                                     nullptr, memory, state->options.checksums);
    {
      const Lock lock(state->mutex);
      landing->bounced_ = bounced;
    }
    if (landing->ticket_->hurried()) bounced->hurry();
    if (landing->ticket_->cancelled()) state->engine->cancel(bounced);
    bounced->on_done([state, landing](std::exception_ptr error) { end(*state, landing, error); });
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
    state->waiting.pop_front();
    state->running.push_back(landing);
    landing->stage_ = Landing::Stage::kRunning;
    landing->since_ = Clock::now();
    // until the road has returned, whatever becomes of the landing
    std::shared_ptr<void> memory = landing->memory_;
    lock.unlock();
    std::string said =
        refused ? concat("the device cannot be used (CUDA error ", refused, ")") : "";
    const std::string word = refused ? "refused" : state->take_road(landing, &said);
    lock.lock();
    state->running.erase(std::remove(state->running.begin(), state->running.end(), landing),
                         state->running.end());
    // it was given up, and another thread took this one's place
    if (state->stuck.erase(landing.get())) {
      lock.unlock();
      memory.reset();
      lock.lock();
      break;
    }
    state->returned = Clock::now();
    if (word.empty()) {
      landing->on_device_ = true;
      state->nbytes += landing->host_.nbytes;
      for (const Request& each : landing->requests_) state->ways[each.file].failures = 0;
    } else {
      const bool is_grave = word == "changed";
      for (const Request& each : landing->requests_) {
        Way& way = state->ways[each.file];
        way.closed |= is_grave || ++way.failures >= kMostFailures;
      }
    }
    lock.unlock();
    memory.reset();
    if (word.empty())
      end(*state, landing, nullptr);
    else
      bounce(state, landing, word.c_str(), said);
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
  own.descriptor = fcntl(own.descriptor, F_DUPFD_CLOEXEC, 0);
  void* handle = nullptr;
  if (own.descriptor < 0) {
    *said = std::strerror(errno);
  } else {
    handle = road->open(own, said);
  }
  const Lock lock(mutex);
  if (own.descriptor >= 0) descriptors.push_back(own.descriptor);
  way->handle = handle;
  way->is_opened = true;
  way->closed |= handle == nullptr;
  return *way;
}

// Reads and verifies by the road. Returns an empty string, or the refusal.
std::string DirectReader::State::take_road(const LandingPtr& landing, std::string* said) {
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
  if (!options.checksums) return "";
  const Span part = part_to_verify(*landing);
  if (part.nbytes == 0) return "";
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
    return "changed";
  }
  return "";
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
    std::vector<LandingPtr> late;
    const auto limit =
        Clock::now() - std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(state->options.late_seconds));
    for (const LandingPtr& landing : state->running)
      if (landing->stage_ == Landing::Stage::kRunning && landing->since_ < limit) {
        late.push_back(landing);
        const std::string path = state->engine->file(landing->requests_.front().file).path;
        state->stuck[landing.get()] = {path, Clock::now()};
        state->start_thread(state);
      }
    // A waiting landing is late only if the road has ended no other read meanwhile.
    const auto punctual =
        std::stable_partition(state->waiting.begin(), state->waiting.end(),
                              [&](const LandingPtr& landing) INFINITY_REQUIRES(state->mutex) {
                                return std::max(landing->since_, state->returned) >= limit;
                              });
    late.insert(late.end(), punctual, state->waiting.end());
    state->waiting.erase(punctual, state->waiting.end());
    for (const LandingPtr& landing : late) {
      landing->stage_ = Landing::Stage::kBounced;
      for (const Request& each : landing->requests_) state->ways[each.file].closed = true;
    }
    lock.unlock();
    for (const LandingPtr& landing : late)
      bounce(state, landing, "late", concat("nothing came in ", state->options.late_seconds, " s"));
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
