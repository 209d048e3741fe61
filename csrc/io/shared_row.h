// SharedRow: lets the ranks of one machine read each other's weights where they lie, instead of sending them.
//
// Every rank has a file in memory (memfd): counters, then the arrays that it shares. It alone writes to it; the others map
// it to read. A gather has a number, the same on all ranks, which all start the same gathers in the same order:
//
//   posted   a rank's own part of this gather lies still, at the place that it names
//   taken    a rank has copied what the others have posted for it
//   over     all ranks have taken it: whose part it is may change it again
//
// The counters are all that passes between the processes, and a futex on each wakes who waits. Who waits also looks for a
// rank whose process has ended, and gives up after a time. A rank that names another gather under the same number is an
// error on whoever reads it, never wrong bytes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#include "base/thread_pool.h"
#include "io/ticket.h"
#include "memory/region.h"

namespace infinity {

class SharedRow {
 public:
  static constexpr std::uint64_t kNobodys = 0;

  // What a rank tells the others, so that they find its file.
  struct Peer {
    int process;
    int file;
    std::uint64_t token;   // in the file, too: another process may have that number by now
    std::uint64_t nbytes;  // of the file
  };

  // Makes the file. Throws StorageError where the system has none to give, or no thread. `threads` copy.
  explicit SharedRow(int threads);
  ~SharedRow();
  SharedRow(const SharedRow&) = delete;
  SharedRow& operator=(const SharedRow&) = delete;
  bool is_ours() const { return process_ == getpid(); }

  // Makes a region of the file, zeroed. Before `connect`. Throws StorageError where the system gives no more.
  std::shared_ptr<Region> allocate(std::size_t nbytes, bool huge_pages, int touch_threads);

  // What to tell the others, once everything is allocated.
  Peer self() const;

  // Maps the files of all `peers`, in the order of the row, of which this rank is number `place`. Throws StorageError, with
  // nothing mapped, where one cannot be: another user's, in another container, on another machine.
  void connect(const std::vector<Peer>& peers, std::size_t place);

  // Closes this rank's file, once all have mapped it: a forked child would keep its memory. A second call does nothing.
  void close_file();

  // Whether `region` was allocated here.
  bool owns(const Region& region) const;

  // Whether it was, and all ranks can read it.
  bool shares(const Region& region) const;

  // Starts a gather of `nbytes` from each rank into `whole`, in the order of the row. This rank's part is at `home`, the
  // beginning of a region that it shares, and is in `whole` already. `what` is the same on all ranks; `kNobodys`, with no
  // home, of one that only completes others'. The ticket finishes when all have copied all; with an error where another
  // rank's process ends, posts something else, or does not come within `patience_seconds`.
  TicketPtr gather(std::uint64_t what, const std::byte* home, std::size_t nbytes, std::byte* whole, double patience_seconds);

  // How many gathers this rank has started, and the tickets of those that are not over.
  std::uint32_t begun() const;
  std::vector<TicketPtr> under_way() const;

  // Ends what is under way, with an error, and lets the files go. Nothing is gathered afterwards.
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
  void await(const Mapped& peer, const std::atomic<std::uint32_t>& counter, std::uint32_t number, double deadline) const;

  const int process_ = getpid();
  int file_ = -1;
  std::uint64_t nbytes_ = 0;
  std::shared_ptr<Region> front_;  // the header's
  std::map<const std::byte*, Allocated> allocated_;  // the regions in the file, by address
  std::size_t place_ = 0;
  std::vector<std::unique_ptr<Mapped>> others_;  // those after this rank, then those before
  std::uint32_t number_ = 0;
  std::atomic<bool> closing_{false};
  bool failed_ = false;  // used on the thread alone
  ThreadPool pool_;
  mutable std::mutex mutex_;
  std::condition_variable told_;
  std::deque<Job> jobs_;  // the first is under way
  std::vector<std::thread> thread_;  // one
};

}  // namespace infinity
