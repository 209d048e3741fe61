#include "update/updater.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <iterator>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/rounding.h"

namespace infinity {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The arrays of an update that have an element per parameter, in the order of Arrays. Loading,
// stepping and saving walk this list.
#define INFINITY_ROLE(name, role, of_state) role,
enum class Role : std::size_t { kWeight, kMaster, INFINITY_MOMENTS(INFINITY_ROLE) kGrad };

// The scales of 8-bit moments, one per block.
enum class Scale : std::size_t { INFINITY_SCALED_MOMENTS(INFINITY_ROLE) };
#undef INFINITY_ROLE

struct Member {
  std::shared_ptr<Extent> UnitUpdate::* extent;
  std::shared_ptr<Extent> Shadow::* shadow;  // null: the array is read only
};

#define INFINITY_ROLE(name, role, of_state) Role::role,
constexpr std::array kRoles{Role::kWeight, Role::kMaster,
                            INFINITY_MOMENTS(INFINITY_ROLE) Role::kGrad};
#undef INFINITY_ROLE
#define INFINITY_SCALE(name, role, of_state) Scale::role,
constexpr std::array kScales{INFINITY_SCALED_MOMENTS(INFINITY_SCALE)};
#undef INFINITY_SCALE

constexpr Member member_of(Role role) {
  switch (role) {
    case Role::kWeight:
      return {&UnitUpdate::weight, &Shadow::weight};
    case Role::kMaster:
      return {&UnitUpdate::master, &Shadow::master};
#define INFINITY_CASE(name, role, of_state) \
  case Role::role:                          \
    return {&UnitUpdate::name, &Shadow::name};
      INFINITY_MOMENTS(INFINITY_CASE)
#undef INFINITY_CASE
    case Role::kGrad:
      break;
  }
  return {&UnitUpdate::grad, nullptr};
}

constexpr Member member_of(Scale scale) {
  switch (scale) {
#define INFINITY_CASE(name, role, of_state) \
  case Scale::role:                         \
    return {&UnitUpdate::name##_scale, &Shadow::name##_scale};
    INFINITY_SCALED_MOMENTS(INFINITY_CASE)
#undef INFINITY_CASE
  }
  return {};
}

template <class Name>
const std::shared_ptr<Extent>& extent_of(const UnitUpdate& update, Name name) {
  return update.*member_of(name).extent;
}

// The extent that the results of an array go to; null if it is read only, or if the update has
// none.
template <class Name>
Extent* target_of(const UnitUpdate& update, Name name) {
  const Member member = member_of(name);
  if (member.shadow == nullptr) return nullptr;
  Extent* const beside = (update.shadow.*member.shadow).get();
  return beside != nullptr ? beside : extent_of(update, name).get();
}

// Whether a run with a gradient touches elements `begin` to `end`.
bool has_gradient(const UnitUpdate& update, std::size_t begin, std::size_t end) {
  return std::any_of(update.runs.begin(), update.runs.end(), [&](const Run& run) {
    return run.has_gradient && run.begin < end && begin < run.end;
  });
}

// Every extent that an update reads or writes.
std::vector<const Extent*> extents_of(const UnitUpdate& update) {
  std::vector<const Extent*> found;
  for (const Role role : kRoles) {
    found.push_back(extent_of(update, role).get());
    if (const Extent* target = target_of(update, role); target != found.back())
      found.push_back(target);
  }
  found.erase(std::remove(found.begin(), found.end(), nullptr), found.end());
  return found;
}

void check_shadow(const UnitUpdate& update) {
  const Shadow& shadow = update.shadow;
#define INFINITY_OR(name, role, of_state) || shadow.name
#define INFINITY_OR_SCALE(name, role, of_state) || shadow.name##_scale
  const bool weights_alone =
      !(shadow.master INFINITY_MOMENTS(INFINITY_OR) INFINITY_SCALED_MOMENTS(INFINITY_OR_SCALE));
#undef INFINITY_OR
#undef INFINITY_OR_SCALE
  const auto check = [&](const Member& member) {
    const auto& from = update.*member.extent;
    const auto& to = update.shadow.*member.shadow;
    if (weights_alone && member.shadow != &Shadow::weight) return;
    INFINITY_REQUIRE(
        bool(from) == bool(to),
        "a shadow has a place for every array of its update, or for the weights alone");
    INFINITY_REQUIRE(
        !from || (from != to && from->is_file() == to->is_file() && from->nbytes() == to->nbytes()),
        "an array of ", from ? from->nbytes() : 0,
        " bytes has another kind or size in its shadow, or is the same");
  };
  for (const Role role : kRoles)
    if (role != Role::kGrad) check(member_of(role));
  for (const Scale scale : kScales) check(member_of(scale));
}

std::size_t role_nbytes(const Layout& layout, Role role) {
  switch (role) {
    case Role::kWeight:
      return element_nbytes(layout.weight);
    case Role::kMaster:
      return layout.master == Master::kSplit ? 2 : 4;
    case Role::kGrad:
      return element_nbytes(layout.grad);
    default:
      return element_nbytes(layout.moments);
  }
}

// Cuts at this many elements are whole checksum blocks in arrays of every element size.
std::size_t chunk_grain(const Layout& layout) {
  return kChecksumNbytes / (layout.moments == DType::kInt8 ? 1 : 2);
}

void check_update(const UnitUpdate& update, const Kernel& kernel) {
  const Layout& layout = update.layout;
  INFINITY_REQUIRE(update.count > 0 && update.count % kBlockNbytes == 0, "an update of ",
                   update.count, " elements: must be a positive multiple of ", kBlockNbytes);
  INFINITY_REQUIRE(update.weight && update.grad, "an update needs a weight and a gradient extent");
  INFINITY_REQUIRE(bool(update.master) == (layout.master != Master::kOwn),
                   "master extent and layout disagree");
  for (const Role role : kRoles) {
    const auto& extent = extent_of(update, role);
    INFINITY_REQUIRE(!extent || extent->nbytes() >= update.count * role_nbytes(layout, role),
                     "an extent of ", extent ? extent->nbytes() : 0, " bytes for ", update.count,
                     " elements of ", role_nbytes(layout, role), " bytes");
  }
  const bool blocks = layout.moments == DType::kInt8;
#define INFINITY_PAIR(name, role, of_state) std::pair{update.name, update.name##_scale},
  for (const auto& [moment, scale] : {INFINITY_SCALED_MOMENTS(INFINITY_PAIR)})
#undef INFINITY_PAIR
    INFINITY_REQUIRE(
        !blocks || !moment ||
            (scale && !scale->is_file() && scale->nbytes() >= update.count / kMomentBlock),
        "8-bit moments need a scale in memory for each of ", update.count / kMomentBlock,
        " blocks");
  if (update.is_shadow()) check_shadow(update);
  std::size_t last = 0;
  for (const Run& run : update.runs) {
    INFINITY_REQUIRE(run.begin >= last && run.begin < run.end && run.end <= update.count, "run ",
                     run.begin, " to ", run.end, " of ", update.count,
                     " elements is empty, out of order or outside");
    last = blocks ? round_up(run.end, kMomentBlock) : run.end;
    INFINITY_REQUIRE(!blocks || run.begin % kMomentBlock == 0, "run ", run.begin, " to ", run.end,
                     " starts inside a block of ", kMomentBlock, " 8-bit moments");
    // throws on what it cannot express
    const Uses uses = kernel.uses(prepare(layout.rule, run.hyper));
    for (const Hyperparameters& missed : run.missed) prepare(layout.rule, missed);
#define INFINITY_NEED(name, role, of_state)                                                       \
  INFINITY_REQUIRE(!uses.name || update.name, "rule ", int(layout.rule), " needs an extent for ", \
                   #name);
    INFINITY_MOMENTS(INFINITY_NEED)
#undef INFINITY_NEED
    INFINITY_REQUIRE(!blocks || uses.has_scales(), "rule ", int(layout.rule),
                     " with a third moment has none in 8 bits");
  }
}

// The first of `sequence` that is ready, before all others one that is also urgent.
template <class Sequence, class IsReady, class IsUrgent>
auto first_of(Sequence& sequence, IsReady is_ready, IsUrgent is_urgent) {
  auto found = sequence.end();
  for (auto each = sequence.begin(); each != sequence.end(); ++each) {
    if ((found != sequence.end() && !is_urgent(*each)) || !is_ready(*each)) continue;
    found = each;
    if (is_urgent(*each)) break;
  }
  return found;
}

constexpr std::size_t kFewUpdates = 1024;

}  // namespace

Updater::Updater(std::shared_ptr<IoEngine> engine, Span slots, int slot_count, int thread_count,
                 std::shared_ptr<void> owner, bool checksums, bool measured)
    : engine_(std::move(engine)),
      slots_(slots),
      slot_nbytes_(slot_count ? round_down(slots.nbytes / slot_count, kBlockNbytes) : 0),
      owner_(std::move(owner)),
      checksums_(checksums),
      slot_saves_(slot_count),
      slot_taken_(slot_count),
      slot_freed_(slot_count),
      pool_(thread_count) {
  if (measured) team_size_.emplace(pool_.thread_count());
  INFINITY_REQUIRE(engine_, "an updater needs an I/O engine");
  INFINITY_REQUIRE(slot_count == 0 || is_aligned(slots.data, kBlockNbytes),
                   "the slots are not aligned to ", kBlockNbytes, " bytes");
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw StorageError(error.code().value(), "",
                       "the system refuses a thread for the optimizer (a limit on processes: "
                       "`ulimit -u`, or the container's pids)");
  }
}

Updater::~Updater() {
  {
    Lock lock(mutex_);
    stopping_ = true;
  }
  signal_->raise();
  thread_.join();
  // Not the slots' saves: those are done a moment before the updates that they end.
  for (const auto& job : unfinished_)
    while (!job->ticket->wait_for(1.0)) {
    }
}

std::size_t Updater::chunk_elements(const UnitUpdate& update, std::size_t slot_nbytes) {
  std::size_t per_element = 0;
  for (const Role role : kRoles) {
    const auto& extent = extent_of(update, role);
    if (extent && extent->is_file()) per_element += role_nbytes(update.layout, role);
  }
  if (per_element == 0) return update.count;
  const std::size_t whole = slot_nbytes / per_element;
  return whole >= update.count ? update.count : round_down(whole, chunk_grain(update.layout));
}

// The chunks of an update: whole tiles that have its runs. A shadow also gets the elements that no
// run touches.
static std::vector<std::pair<std::size_t, std::size_t>> chunks_of(const UnitUpdate& update,
                                                                  std::size_t chunk) {
  const std::size_t grain = chunk_grain(update.layout);
  std::vector<std::pair<std::size_t, std::size_t>> covered;
  if (update.is_shadow()) covered.emplace_back(0, update.count);
  for (const Run& run : update.runs) {
    const std::size_t begin = round_down(run.begin, grain);
    const std::size_t end = std::min(update.count, round_up(run.end, grain));
    if (!covered.empty() && begin <= covered.back().second)
      covered.back().second = std::max(covered.back().second, end);
    else
      covered.emplace_back(begin, end);
  }
  std::vector<std::pair<std::size_t, std::size_t>> chunks;
  for (const auto& [begin, end] : covered)
    for (std::size_t at = begin; at < end; at += chunk)
      chunks.emplace_back(at, std::min(at + chunk, end));
  return chunks;
}

std::shared_ptr<Updater::Job> Updater::make_job(const UnitUpdate& update) const {
  auto job = std::make_shared<Job>();
  job->kernel = find_kernel(update.layout);
  check_update(update, job->kernel);
  const std::size_t chunk = chunk_elements(update, slot_nbytes_);
  INFINITY_REQUIRE(chunk > 0, "a slot of ", slot_nbytes_, " bytes is too small for ",
                   chunk_grain(update.layout), " elements");
  job->chunks = chunks_of(update, chunk);
  // An update without runs ends with a part that is nothing.
  job->ticket = std::make_shared<Ticket>(std::max<std::size_t>(job->chunks.size(), 1));
  job->update = update;
  return job;
}

// Puts the job behind the transfers to its arrays that are under way, and behind the earlier
// updates of them.
void Updater::put_in_order(Job& job, Before& entries) {
  std::vector<TicketPtr> before;
  if (job.update.after) before.push_back(job.update.after);
  for (const Role role : kRoles)
    if (const auto& extent = extent_of(job.update, role); extent && extent->is_file())
      if (TicketPtr writes = extent->writes_under_way()) before.push_back(std::move(writes));
  for (const Extent* extent : extents_of(job.update)) {
    TicketPtr& last = last_updates_[extent];
    if (last && last != job.ticket && !last->done()) before.push_back(last);
    entries.emplace_back(&last, last);
    last = job.ticket;
  }
  job.update.after = joined(before);
  if (job.update.after)
    job.update.after->on_done([signal = signal_](std::exception_ptr) { signal->raise(); });
}

// Extents come and go: their finished updates are forgotten now and then.
void Updater::forget_finished() {
  if (last_updates_.size() < kept_updates_) return;
  for (auto each = last_updates_.begin(); each != last_updates_.end();)
    each = !each->second || each->second->done() ? last_updates_.erase(each) : std::next(each);
  kept_updates_ = std::max<std::size_t>(kFewUpdates, 2 * last_updates_.size());
}

TicketPtr Updater::submit(UnitUpdate update) {
  const auto shared = std::make_shared<UnitUpdate>(std::move(update));
  shared->ticket = nullptr;
  submit_all({shared});
  return shared->ticket;
}

void Updater::submit_all(const std::vector<std::shared_ptr<UnitUpdate>>& updates) {
  INFINITY_REQUIRE(is_ours(), "an updater of process ", process_, " was used in its forked child ",
                   getpid());
  std::vector<std::shared_ptr<Job>> jobs;
  std::vector<UnitUpdate*> submitted;
  for (const auto& update : updates) {
    if (update->ticket) continue;
    jobs.push_back(make_job(*update));
    submitted.push_back(update.get());
  }
  if (const auto error = failure_->get()) std::rethrow_exception(error);
  Lock submitting(submitting_);
  Before entries;
  try {
    forget_finished();
    for (const auto& job : jobs) put_in_order(*job, entries);
    std::list<Waiting> waiting;
    for (const auto& job : jobs) waiting.push_back({job, {job}});
    Lock lock(mutex_);
    submitted_.splice(submitted_.end(), waiting);
  } catch (...) {
    // Later updates come after those that are under way, not after these.
    for (auto each = entries.rbegin(); each != entries.rend(); ++each)
      each->first->swap(each->second);
    for (const auto& job : jobs) job->end(std::current_exception());  // nothing waits for them
    throw;
  }
  for (std::size_t i = 0; i < submitted.size(); ++i) submitted[i]->ticket = jobs[i]->ticket;
  signal_->raise();
}

UpdaterTotals Updater::totals() const {
  Lock lock(mutex_);
  return totals_;
}

void Updater::record_events() {
  Lock lock(recorder_->mutex);
  recorder_->on = true;
  recorder_->events.clear();
}

std::vector<UpdaterEvent> Updater::take_events() {
  Lock lock(recorder_->mutex);
  return std::exchange(recorder_->events, {});
}

void Updater::run() {
  use_default_rounding();
  Chunks loading;
  for (;;) {
    try {
      serve(loading);
      return;
    } catch (...) {  // out of memory, for example: end all tickets
      end_all(std::current_exception(), loading);
    }
  }
}

// Loads chunks as long as there are slots, and steps those that have arrived: no chunk is stepped
// after one that failed. Otherwise blocks until any transfer completes.
void Updater::serve(Chunks& loading) {
  for (;;) {
    std::uint64_t seen;
    {
      Lock lock(signal_->mutex);
      seen = signal_->count;
    }
    bool stopping;
    {
      Lock lock(mutex_);
      stopping = stopping_;
      jobs_.splice(jobs_.end(), submitted_);
    }
    for (auto place = free_place(); place && start_next(loading, *place); place = free_place()) {
    }
    const auto arrived = first_of(
        loading,
        [](const Chunk& chunk) {
          return chunk.turn == chunk.job->stepped && (!chunk.loads || chunk.loads->done());
        },
        [](const Chunk& chunk) { return chunk.job->ticket->hurried(); });
    if (arrived != loading.end()) {
      Chunk chunk = std::move(*arrived);
      loading.erase(arrived);
      finish(chunk);
      continue;
    }
    const bool waiting = !loading.empty() || !jobs_.empty();
    if (!waiting && stopping) return;
    const auto start = Clock::now();
    {
      Lock lock(signal_->mutex);
      signal_->changed.wait(
          lock, [&]() INFINITY_REQUIRES(signal_->mutex) { return signal_->count != seen; });
    }
    if (waiting) {
      Lock lock(mutex_);
      totals_.wait_seconds += seconds_since(start);
    }
  }
}

void Updater::end_all(const std::exception_ptr& error, Chunks& loading) {
  failure_->set(error);
  for (Chunk& chunk : loading) {
    release(chunk);
    chunk.job->ticket->part_done(error);
  }
  loading.clear();
}

// The place of the next chunk: a slot without a load or a save, or no slot if the updater has none.
// Nothing if all slots are busy.
std::optional<Updater::Place> Updater::free_place() const {
  if (slot_saves_.empty()) return Place{};
  for (std::size_t slot = 0; slot < slot_saves_.size(); ++slot)
    if (!slot_taken_[slot] && (!slot_saves_[slot] || slot_saves_[slot]->done()))
      return Place{static_cast<int>(slot)};
  return std::nullopt;
}

// When a chunk's update was asked for and its `inputs` were there.
double Updater::ready_at(const Chunk& chunk, const TicketPtr& inputs) {
  const Job& job = *chunk.job;
  const double asked = job.update.asked > 0 ? job.update.asked : job.ticket->times().first;
  return inputs && inputs->done() ? std::max(asked, inputs->times().second) : asked;
}

// Since when the first of the free slots has been free.
double Updater::free_since() const {
  double first = slot_saves_.empty() ? 0 : Recorder::now();
  for (std::size_t slot = 0; slot < slot_saves_.size(); ++slot) {
    const TicketPtr& saves = slot_saves_[slot];
    if (slot_taken_[slot] || (saves && !saves->done())) continue;
    first = std::min(first, std::max(slot_freed_[slot], saves ? saves->times().second : 0));
  }
  return first;
}

// Frees the chunk's slot, if it has one, as soon as `saves` have finished.
void Updater::release(const Chunk& chunk, TicketPtr saves) noexcept {
  if (!chunk.slot) return;
  slot_taken_[*chunk.slot] = false;
  slot_freed_[*chunk.slot] = Recorder::now();
  if (saves) slot_saves_[*chunk.slot] = std::move(saves);
}

// Starts the loads of the next chunk. False when there is none. A job
// begins when all that it comes after has finished: until then a slot serves another one.
bool Updater::start_next(Chunks& loading, const Place& place) {
  const std::exception_ptr error = failure_->get();
  const auto found = first_of(
      jobs_,
      [&](const Waiting& each) {
        return error || !each.job->update.after || each.job->update.after->done();
      },
      [](const Waiting& each) { return each.job->ticket->hurried(); });
  if (found == jobs_.end()) return false;
  const std::shared_ptr<Job> job = found->job;
  Chunk chunk;
  chunk.job = job;
  if (!found->unfinished.empty()) {  // its first chunk
    unfinished_.remove_if([](const auto& other) { return other->ticket->done(); });
    unfinished_.splice(unfinished_.end(), found->unfinished);
  }
  const bool is_nothing = job->chunks.empty();
  if (!is_nothing) std::tie(chunk.begin, chunk.end) = job->chunks[job->next++];
  if (job->next == job->chunks.size()) jobs_.erase(found);
  if (error || is_nothing) {
    job->ticket->part_done(error);
    return true;
  }
  try {
    load(chunk, place);
    loading.push_back(std::move(chunk));
    loading.back().turn = job->loaded++;
  } catch (...) {
    const std::exception_ptr failed = std::current_exception();
    failure_->set(failed);
    if (chunk.loads)
      while (!chunk.loads->wait_for(1.0)) {  // no read may arrive in a slot that another chunk gets
      }
    release(chunk);
    job->ticket->part_done(failed);
  }
  return true;
}

// The tiles of a chunk that a run with a gradient touches, neighbours in one.
std::vector<std::pair<std::size_t, std::size_t>> Updater::tiles_with_gradient(const Chunk& chunk) {
  const UnitUpdate& update = chunk.job->update;
  const std::size_t grain = chunk_grain(update.layout);
  std::vector<std::pair<std::size_t, std::size_t>> tiles;
  for (std::size_t at = chunk.begin; at < chunk.end; at += grain) {
    const std::size_t end = std::min(at + grain, chunk.end);
    if (!has_gradient(update, at, end)) continue;
    if (!tiles.empty() && tiles.back().second == at)
      tiles.back().second = end;
    else
      tiles.emplace_back(at, end);
  }
  return tiles;
}

// Fills in the chunk's addresses and starts the loads of its arrays on disk into the slot.
void Updater::load(Chunk& chunk, const Place& place) {
  const Job& job = *chunk.job;
  std::array<void*, kRoles.size()> addresses{};
  const auto address = [&](Role role) -> void*& {
    return addresses[static_cast<std::size_t>(role)];
  };
  std::size_t used = 0;
  std::vector<Request> requests;
  std::vector<TicketPtr> loads;
  for (const Role role : kRoles) {
    const auto& extent = extent_of(job.update, role);
    if (!extent) continue;
    const std::size_t size = role_nbytes(job.update.layout, role);
    Extent* const target = target_of(job.update, role);
    if (!extent->is_file()) {
      address(role) = target != nullptr ? target->memory() : extent->memory();
      if (address(role) != extent->memory())
        chunk.copies.push_back({extent->memory(), target->memory(), size});
      continue;
    }
    INFINITY_CHECK(place.slot, "an array on disk, and no slot to load it into");
    const Span span{slots_.data + *place.slot * slot_nbytes_ + used,
                    (chunk.end - chunk.begin) * size};
    INFINITY_CHECK(used + span.nbytes <= slot_nbytes_, "a chunk outgrew its slot");
    used += span.nbytes;
    chunk.parts.push_back({extent.get(), target, chunk.begin * size, span, role == Role::kGrad});
    if (checksums_) {
      Part& part = chunk.parts.back();
      const Extent::Expected known = extent->expected(part.at, span.nbytes, *engine_);
      part.wrote = known.sums;
      if (known.ticket) loads.push_back(known.ticket);
      if (target != nullptr)
        part.sums = std::make_shared<std::vector<std::uint32_t>>(checksum_count(span.nbytes));
    }
    for (const auto& [begin, end] : role == Role::kGrad
                                        ? tiles_with_gradient(chunk)
                                        : std::vector{std::pair{chunk.begin, chunk.end}})
      for (Request& each : extent->requests(
               Op::kRead, begin * size,
               Span{span.data + (begin - chunk.begin) * size, (end - begin) * size}, owner_))
        requests.push_back(std::move(each));
    address(role) = span.data - chunk.begin * size;
  }
  Arrays& arrays = chunk.arrays;
  arrays.weight = address(Role::kWeight);
  arrays.master = address(Role::kMaster);
  arrays.grad = address(Role::kGrad);
#define INFINITY_SET(name, role, of_state) arrays.name = address(Role::role);
  INFINITY_MOMENTS(INFINITY_SET)
#undef INFINITY_SET
  std::array<std::uint8_t*, kScales.size()> scales{};
  for (const Scale scale : kScales) {
    const auto& extent = extent_of(job.update, scale);
    if (!extent) continue;
    Extent* const target = target_of(job.update, scale);
    scales[static_cast<std::size_t>(scale)] = reinterpret_cast<std::uint8_t*>(target->memory());
    if (target != extent.get()) chunk.copies.push_back({extent->memory(), target->memory(), 0});
  }
#define INFINITY_SET(name, role, of_state) \
  arrays.name##_scale = scales[static_cast<std::size_t>(Scale::role)];
  INFINITY_SCALED_MOMENTS(INFINITY_SET)
#undef INFINITY_SET
  if (requests.empty()) {
    chunk.loads = job.update.after;
    return;
  }
  const double start = Recorder::now();
  const double ready = std::max(free_since(), ready_at(chunk, job.update.after));
  chunk.slot = place.slot;
  slot_taken_[*chunk.slot] = true;
  chunk.loads =
      engine_->submit(requests, job.update.after);  // what fails from here on waits for it
  loads.push_back(chunk.loads);
  chunk.loads = joined(loads);
  chunk.loads->on_done([recorder = recorder_, signal = signal_, label = job.update.label,
                        slot = chunk.slot, ready, start](std::exception_ptr) {
    recorder->add("load", label, slot, ready, start);
    signal->raise();
  });
}

void Updater::finish(Chunk& chunk) {
  TicketPtr saves;
  ++chunk.job->stepped;
  try {
    if (chunk.loads) chunk.loads->wait();  // has finished: this throws its error, if any
    const double ready = ready_at(chunk, chunk.loads);
    const auto loaded = Clock::now();
    const double start = Recorder::now();
    if (const auto error = failure_->get()) std::rethrow_exception(error);
    step(chunk);
    const int label = chunk.job->update.label;
    recorder_->add("step", label, chunk.slot, ready, start);
    const double stepped = Recorder::now();
    {
      Lock lock(mutex_);
      totals_.step_seconds += seconds_since(loaded);
      totals_.elements += chunk.end - chunk.begin;
    }
    std::vector<Request> requests;
    for (const Part& part : chunk.parts)
      if (part.target != nullptr)
        for (Request& each : part.target->requests(Op::kWrite, part.at, part.span, owner_))
          requests.push_back(std::move(each));
    if (requests.empty()) {
      release(chunk);
      return chunk.job->ticket->part_done();
    }
    const double saving = Recorder::now();
    std::vector<TicketPtr> all;
    for (const Part& part : chunk.parts)
      if (part.sums)
        if (TicketPtr recorded = part.target->record(part.at, part.sums, *engine_))
          all.push_back(std::move(recorded));
    Ticket::Callbacks follow;
    follow.push_back([recorder = recorder_, signal = signal_, failure = failure_, job = chunk.job,
                      label, slot = chunk.slot, stepped, saving](std::exception_ptr error) {
      recorder->add("save", label, slot, stepped, saving);
      if (error) failure->set(error);
      signal->raise();  // the slot is free
      job->ticket->part_done(error);
    });
    saves = engine_->submit(requests);  // what fails from here on waits for it
    all.push_back(saves);
    saves = joined(all);
    release(chunk, saves);
    saves->on_done(std::move(follow));
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    failure_->set(error);
    if (saves)
      while (
          !saves->wait_for(1.0)) {  // no chunk may get the slot, and no later write may pass these
      }
    release(chunk);
    chunk.job->ticket->part_done(error);
  }
}

// Tile by tile, so that the bytes of one are checked, stepped and summed while they are in the
// cache.
void Updater::step(Chunk& chunk) {
  const UnitUpdate& update = chunk.job->update;
  const std::size_t grain = chunk_grain(update.layout);
  std::vector<std::vector<Constants>> constants;  // of each run: of the missed steps, and its own
  for (const Run& run : update.runs) {
    std::vector<Constants>& of_run = constants.emplace_back();
    for (const Hyperparameters& missed : run.missed)
      of_run.push_back(prepare(update.layout.rule, missed));
    of_run.push_back(prepare(update.layout.rule, run.hyper));
  }
  Failure failure;
  const int threads = team_size_ ? team_size_->next(chunk.end - chunk.begin) : 0;
  const auto start = Clock::now();
  pool_.for_range(
      chunk.begin, chunk.end, grain,
      [&](std::size_t begin, std::size_t end) {
        try {
          for (std::size_t at = begin; at < end; at += grain)
            step_tile(chunk, constants, at, std::min(at + grain, end));
        } catch (...) {
          failure.set(std::current_exception());
        }
      },
      threads);
  if (const auto error = failure.get()) std::rethrow_exception(error);
  if (team_size_) team_size_->note(chunk.end - chunk.begin, seconds_since(start));
  for (const Role role : kRoles)
    if (Extent* const target = target_of(update, role)) target->set_version(update.version);
}

void Updater::step_tile(Chunk& chunk, const std::vector<std::vector<Constants>>& constants,
                        std::size_t begin, std::size_t end) {
  // A gradient of zeros, for a tile of any layout.
  alignas(64) static const std::array<std::byte, kChecksumNbytes * sizeof(float)> zeros{};
  const std::size_t count = chunk.end - chunk.begin;
  const auto part_of = [&](const Part& part) {
    const std::size_t size = part.span.nbytes / count;  // bytes of an element
    const std::size_t skipped = (begin - chunk.begin) * size;
    return std::pair{part.at + skipped, Span{part.span.data + skipped, (end - begin) * size}};
  };
  for (const Part& part : chunk.parts) {
    if (!checksums_ || (part.is_gradient && !has_gradient(chunk.job->update, begin, end))) continue;
    const auto [at, span] = part_of(part);
    std::vector<std::uint32_t> found(checksum_count(span.nbytes));
    crc32c_blocks(span.data, span.nbytes, found.data());
    part.extent->compare(at, found, part.wrote, part.at, *engine_);
  }
  for (const Copy& copy : chunk.copies) {
    const auto bytes_before = [&](std::size_t element) {
      return copy.per_element ? element * copy.per_element
                              : (element + kMomentBlock - 1) / kMomentBlock;
    };
    const std::size_t first = bytes_before(begin);
    std::memcpy(copy.to + first, copy.from + first, bytes_before(end) - first);
  }
  for (std::size_t i = 0; i < constants.size(); ++i) {
    const Run& run = chunk.job->update.runs[i];
    const std::size_t first = std::max(run.begin, begin), last = std::min(run.end, end);
    if (first >= last) continue;
    Arrays arrays = chunk.arrays;
    arrays.grad = zeros.data() - first * role_nbytes(chunk.job->update.layout, Role::kGrad);
    for (std::size_t missed = 0; missed < run.missed.size(); ++missed)
      chunk.job->kernel.step(arrays, first, last, constants[i][missed]);
    if (run.has_gradient) chunk.job->kernel.step(chunk.arrays, first, last, constants[i].back());
  }
  for (const Part& part : chunk.parts) {
    if (!part.sums) continue;
    const auto [at, span] = part_of(part);
    crc32c_blocks(span.data, span.nbytes, part.sums->data() + (at - part.at) / kChecksumNbytes);
  }
}

}  // namespace infinity
