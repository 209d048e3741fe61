#include "io/shared_row.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "base/check.h"
#include "base/spawn.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // of Linux 5.3, wherever the headers are older than that
#endif

namespace infinity {
namespace {

// gathers that a rank may be ahead of the last one that all have taken
constexpr std::size_t kMostPosted = 1024;
constexpr std::size_t kPieceNbytes = 1024 * 1024;
constexpr long kLookNanoseconds = 50'000'000;  // how long one waits between two looks at the others

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Numbers wrap around: a counter has come to a number when it is less than half of them behind.
bool has_come(std::uint32_t counter, std::uint32_t number) {
  return static_cast<std::int32_t>(counter - number) >= 0;
}

long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), operation, value, limit,
                 nullptr, 0);
}

void advance(std::atomic<std::uint32_t>& counter, std::uint32_t number) {
  counter.store(number, std::memory_order_release);
  futex(counter, FUTEX_WAKE, INT_MAX, nullptr);
}

int make_file() {
  constexpr unsigned kCloseOnExec = 1, kNotExecutable = 8;
  // the second of Linux 6.3 and later
  for (const unsigned flags : {kCloseOnExec | kNotExecutable, kCloseOnExec}) {
    const int file = static_cast<int>(syscall(SYS_memfd_create, "infinity-weights", flags));
    if (file >= 0) return file;
    if (errno != EINVAL) break;
  }
  throw StorageError(errno, "", "cannot make a file in memory");
}

}  // namespace

struct SharedRow::Header {
  std::uint64_t token;
  alignas(64) std::atomic<std::uint32_t> posted;
  alignas(64) std::atomic<std::uint32_t> taken;
  alignas(64) Posting postings[kMostPosted];
};

struct SharedRow::Mapped {
  const std::size_t place;
  const int process;
  const int exited;  // a descriptor that can be read once the process has ended
  std::unique_ptr<Region> region;

  Mapped(std::size_t place, int process)
      : place(place),
        process(process),
        exited(static_cast<int>(syscall(SYS_pidfd_open, process, 0))) {
    if (exited < 0)
      throw StorageError(errno, "",
                         concat("process ", process, " of rank ", place, " cannot be seen"));
  }
  ~Mapped() { ::close(exited); }
  const Header& header() const { return *reinterpret_cast<const Header*>(region->data()); }
  bool has_ended() const {
    pollfd asked{exited, POLLIN, 0};
    return poll(&asked, 1, 0) > 0;
  }
};

SharedRow::SharedRow(int threads) : pool_(threads) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "a futex is the counter itself");
  file_ = make_file();
  try {
    front_ = allocate(sizeof(Header), false, 0);
    std::random_device random;
    auto* header = new (front_->data()) Header{};
    header->token = (static_cast<std::uint64_t>(random()) << 32) | random();
    if (!try_spawn(thread_, [this] { serve(); }))
      throw StorageError(EAGAIN, "", "the system has no thread to give");
  } catch (...) {
    close_file();
    throw;
  }
}

SharedRow::~SharedRow() { close(); }

std::shared_ptr<Region> SharedRow::allocate(std::size_t nbytes, bool huge_pages,
                                            int touch_threads) {
  INFINITY_REQUIRE(others_.empty() && file_ >= 0,
                   "what is shared is allocated before the ranks know of each other");
  const std::size_t wanted = round_up(nbytes, kBlockNbytes);
  // Huge pages lie on such borders in the file, too. What is skipped takes no memory.
  const std::uint64_t begin =
      huge_pages && wanted >= kHugeNbytes ? round_up(nbytes_, kHugeNbytes) : nbytes_;
  if (ftruncate(file_, static_cast<off_t>(begin + wanted)) != 0)
    throw StorageError(errno, "", concat("cannot share ", wanted, " bytes of memory"));
  auto region =
      std::make_shared<Region>(nbytes, huge_pages, touch_threads, FileRange{file_, begin, true});
  allocated_[region->data()] = {region, begin};
  nbytes_ = begin + wanted;
  return region;
}

SharedRow::Peer SharedRow::self() const {
  return {process_, file_, reinterpret_cast<const Header*>(front_->data())->token, nbytes_};
}

void SharedRow::connect(const std::vector<Peer>& peers, std::size_t place) {
  INFINITY_REQUIRE(front_ && place < peers.size() && peers[place].token == self().token, "place ",
                   place, " is another rank's");
  std::vector<std::unique_ptr<Mapped>> found;
  // each begins with another one: not all read the same memory at once
  for (std::size_t step = 1; step < peers.size(); ++step) {
    const std::size_t other = (place + step) % peers.size();
    const Peer& peer = peers[other];
    auto mapped = std::make_unique<Mapped>(other, peer.process);
    const std::string path = concat("/proc/", peer.process, "/fd/", peer.file);
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0)
      throw StorageError(errno, path, concat("the memory of rank ", other, " cannot be opened"));
    const bool whole = lseek(file, 0, SEEK_END) >= static_cast<off_t>(peer.nbytes) &&
                       peer.nbytes >= sizeof(Header);
    try {
      if (whole)
        mapped->region = std::make_unique<Region>(peer.nbytes, true, 0, FileRange{file, 0, false});
    } catch (...) {
      ::close(file);
      throw;
    }
    ::close(file);
    if (!whole || mapped->header().token != peer.token)
      throw StorageError(ESTALE, path, concat("what rank ", other, " named is not its memory"));
    found.push_back(std::move(mapped));
  }
  place_ = place;
  others_ = std::move(found);
}

bool SharedRow::owns(const Region& region) const {
  const auto found = allocated_.find(region.data());
  return found != allocated_.end() && found->second.region.lock().get() == &region;
}

bool SharedRow::shares(const Region& region) const { return !others_.empty() && owns(region); }

TicketPtr SharedRow::gather(std::uint64_t what, const std::byte* home, std::size_t nbytes,
                            std::byte* whole, double patience_seconds) {
  Lock lock(mutex_);
  INFINITY_REQUIRE(!closing_ && !others_.empty(),
                   "the ranks do not know of each other's memory, or no more");
  const auto found = allocated_.find(home);
  const bool is_shared = found != allocated_.end() && !found->second.region.expired();
  INFINITY_REQUIRE(is_shared || (home == nullptr && what == kNobodys), "this memory is not shared");
  INFINITY_REQUIRE(nbytes <= nbytes_, nbytes, " bytes are more than what is shared");
  const std::uint32_t number = number_ + 1;
  for (const auto& peer : others_)
    INFINITY_CHECK(
        has_come(peer->header().taken.load(std::memory_order_acquire), number - kMostPosted),
        "more than ", kMostPosted, " gathers are under way");
  const Posting mine{is_shared ? found->second.offset : 0, nbytes, what};
  jobs_.push_back({number, mine, whole, patience_seconds, std::make_shared<Ticket>(1)});
  number_ = number;
  post(number, mine);  // nothing can fail from here on
  changed_.notify_one();
  return jobs_.back().ticket;
}

std::uint32_t SharedRow::begun() const {
  Lock lock(mutex_);
  return number_;
}

std::vector<TicketPtr> SharedRow::under_way() const {
  Lock lock(mutex_);
  std::vector<TicketPtr> found;
  for (const Job& job : jobs_) found.push_back(job.ticket);
  return found;
}

void SharedRow::serve() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this]() INFINITY_REQUIRES(mutex_) { return closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = jobs_.front();
    lock.unlock();
    std::exception_ptr error;
    try {
      take(job);
    } catch (...) {
      error = std::current_exception();
      failed_ = true;
    }
    lock.lock();
    jobs_.pop_front();
    lock.unlock();
    job.ticket->part_done(error);
    lock.lock();
  }
}

void SharedRow::post(std::uint32_t number, const Posting& posting) {
  auto* header = reinterpret_cast<Header*>(front_->data());
  header->postings[number % kMostPosted] = posting;
  advance(header->posted, number);
}

void SharedRow::take(const Job& job) {
  if (failed_) throw std::runtime_error("a gather through shared memory failed before");
  const Posting& mine = job.mine;
  const double deadline = now() + job.patience_seconds;
  for (const auto& peer : others_) {
    await(*peer, peer->header().posted, job.number, deadline);
    const Posting theirs = peer->header().postings[job.number % kMostPosted];
    const bool same = theirs.what == mine.what || theirs.what == kNobodys || mine.what == kNobodys;
    if (!same || theirs.nbytes != mine.nbytes || theirs.offset > peer->region->nbytes() ||
        theirs.nbytes > peer->region->nbytes() - theirs.offset)
      throw std::runtime_error(concat("rank ", peer->place, " of this row shares ", theirs.nbytes,
                                      " bytes of another gather than the ", mine.nbytes,
                                      " expected as number ", job.number));
    const std::byte* from = peer->region->data() + theirs.offset;
    std::byte* to = job.whole + peer->place * mine.nbytes;
    pool_.for_range(0, mine.nbytes, kPieceNbytes, [&](std::size_t begin, std::size_t end) {
      std::memcpy(to + begin, from + begin, end - begin);
    });
  }
  advance(reinterpret_cast<Header*>(front_->data())->taken, job.number);
  for (const auto& peer : others_) await(*peer, peer->header().taken, job.number, deadline);
}

void SharedRow::await(const Mapped& peer, const std::atomic<std::uint32_t>& counter,
                      std::uint32_t number, double deadline) const {
  const timespec look{0, kLookNanoseconds};
  for (;;) {
    const std::uint32_t seen = counter.load(std::memory_order_acquire);
    if (has_come(seen, number)) return;
    if (closing_) throw std::runtime_error("the row was closed");
    if (futex(counter, FUTEX_WAIT, seen, &look) == 0 || errno == EAGAIN) continue;
    // before the counter is read again: what it did last counts
    const bool has_ended = peer.has_ended();
    if (has_come(counter.load(std::memory_order_acquire), number)) return;
    if (has_ended) throw std::runtime_error(concat("process ", peer.process, " has ended"));
    if (now() > deadline)
      throw std::runtime_error(concat("timed out waiting for process ", peer.process));
  }
}

void SharedRow::close_file() {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
}

void SharedRow::close() {
  if (!is_ours()) return;
  {
    Lock lock(mutex_);
    if (closing_) return;
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : thread_) thread.join();
  others_.clear();
  allocated_.clear();
  front_.reset();
  close_file();
}

}  // namespace infinity
