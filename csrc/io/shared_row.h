// SharedRow: lets the ranks of one machine read each other's weights in place, instead of sending
// them.
//
// Every rank has a file in memory (memfd): counters, then the arrays that it shares. It alone
// writes to the file; the others map it read-only. A gather has a number, the same on all ranks.
// All ranks start the same gathers in the same order:
//
//   posted   a rank's own part of this gather is final, at the place that it names
//   taken    a rank has copied what the others have posted for it
//   over     all ranks have taken it: the owner of a part may change it again
//
// The counters are all that passes between the processes; a futex on each wakes waiting ranks. A
// waiting rank also checks whether another rank's process has ended, and gives up after a time. If
// a rank posts another gather under the same number, the ranks that read it fail with an error,
// never with wrong bytes.
//
// Thread safety: `gather`, `begun`, `under_way` and `close` may be called from any thread.
// `allocate`, `connect`, `close_file`, `owns` and `shares` are for the thread that sets the row up,
// not beside each other nor beside `close`. In a forked child only `is_ours` and `close` are valid.
// `mutex_` guards the members marked so. It is never held while tickets end, so there is no lock
// order. The counters in the files are atomics that processes share.
// Ownership: the row owns its file, its thread and its mappings of the others' files. Callers share
// the regions; the memory stays valid while one of them holds a region.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include <unistd.h>

#include "base/thread_pool.h"
#include "base/thread_safety.h"
#include "io/ticket.h"
#include "memory/region.h"

namespace infinity {

class SharedRow {
 public:
  static constexpr std::uint64_t kNobodys = 0;

  // What a rank sends the others, so that they find its file.
  struct Peer {
    int process;
    int file;
    std::uint64_t token;  // in the file, too: another process may have that number by now
    std::uint64_t nbytes;  // of the file
  };

  // Creates the file. `threads` threads copy. Throws StorageError if the system refuses a file or a
  // thread.
  explicit SharedRow(int threads);
  ~SharedRow();
  SharedRow(const SharedRow&) = delete;
  SharedRow& operator=(const SharedRow&) = delete;
  bool is_ours() const { return process_ == getpid(); }

  // Makes a zeroed region of the file. Precondition: before `connect`. Throws StorageError if the
  // system has no memory left.
  std::shared_ptr<Region> allocate(std::size_t nbytes, bool huge_pages, int touch_threads);

  // What to send the others, once everything is allocated.
  Peer self() const;

  // Maps the files of all `peers`, in the order of the row; this rank is number `place`. Throws
  // StorageError, with nothing mapped, if a file cannot be mapped: another user's, or in another
  // container or machine.
  void connect(const std::vector<Peer>& peers, std::size_t place);

  // Closes this rank's file, after all ranks have mapped it: a forked child would keep its memory.
  // Idempotent.
  void close_file();

  // True if `region` was allocated here.
  bool owns(const Region& region) const;

  // True if `region` was allocated here and all ranks can read it.
  bool shares(const Region& region) const;

  // Starts a gather of `nbytes` from each rank into `whole`, in the order of the row. This rank's
  // part is at `home`, the beginning of a shared region, and is in `whole` already. `what` is the
  // same on all ranks; a rank that only completes the others' gather passes `kNobodys` and no home.
  // The ticket finishes when all ranks have copied everything. It fails if another rank's process
  // ends, posts another gather, or does not arrive within `patience_seconds`.
  TicketPtr gather(std::uint64_t what, const std::byte* home, std::size_t nbytes, std::byte* whole,
                   double patience_seconds);

  // The number of gathers that this rank has started, and the tickets of the unfinished ones.
  std::uint32_t begun() const;
  std::vector<TicketPtr> under_way() const;

  // Ends the gathers under way with an error, and unmaps the files. No gather can start afterwards.
  void close();

 private:
  struct Header;
  struct Mapped;  // another rank's file
  struct Posting {
    std::uint64_t offset, nbytes, what;
  };
  struct Job {
    std::uint32_t number;
    Posting mine;
    std::byte* whole;
    double patience_seconds;
    TicketPtr ticket;
  };
  struct Allocated {
    std::weak_ptr<Region> region;
    std::uint64_t offset;
  };

  void serve();
  void post(std::uint32_t number, const Posting& posting);
  void take(const Job& job);
  void await(const Mapped& peer, const std::atomic<std::uint32_t>& counter, std::uint32_t number,
             double deadline) const;

  const int process_ = getpid();
  int file_ = -1;
  std::uint64_t nbytes_ = 0;
  std::shared_ptr<Region> front_;  // the header's
  std::map<const std::byte*, Allocated> allocated_;  // the regions in the file, by address
  std::size_t place_ = 0;
  std::vector<std::unique_ptr<Mapped>> others_;  // those after this rank, then those before
  std::atomic<bool> closing_{false};
  bool failed_ = false;  // of the thread alone
  ThreadPool pool_;
  mutable Mutex mutex_;
  std::condition_variable changed_;
  std::uint32_t number_ INFINITY_GUARDED_BY(mutex_) = 0;
  std::deque<Job> jobs_ INFINITY_GUARDED_BY(mutex_);  // the first is under way
  std::vector<std::thread> thread_;  // one
};

}  // namespace infinity
