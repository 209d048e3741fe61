// PinnedPool: leases of any size out of one Region. Lease: a move-only claim on a span of it.
//
// A transfer that uses a lease's memory holds the claim too (`hold`). So memory whose lease is
// dropped during a transfer returns to the pool when the transfer ends, and no later lease meets a
// late read.
//
// Sizes are rounded up to 4096 bytes, never to powers of two, so a small tensor takes a small slot.
// Free neighbours merge at once. The pool never grows: a lease that does not fit is refused, and
// the caller decides what to give up for it.
//
// Thread safety: PinnedPool may be used from any thread. A Lease is used by one thread at a time;
// what `hold` returned may be dropped by any. In a forked child nothing is given back: its parent's
// threads may have held the mutex at the fork.
// Ownership: a claim owns its span and keeps the pool; the pool keeps its region. A claim is held
// by its Lease and by every transfer that called `hold`.
// `mutex_` guards the members marked so. It is a leaf: nothing else is locked while it is held.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include <unistd.h>

#include "base/span.h"
#include "base/thread_safety.h"
#include "memory/region.h"

namespace infinity {

class PinnedPool;

using FreeSpans = std::map<std::size_t, std::size_t>;  // offset -> nbytes

// A span of a pool that is in use. The last holder gives it back.
class Claim {
 public:
  Claim(std::shared_ptr<PinnedPool> pool, Span span, std::uint64_t round, FreeSpans::node_type back)
      : pool_(std::move(pool)), span_(span), round_(round), back_(std::move(back)) {}
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  Span span() const { return span_; }
  const std::shared_ptr<PinnedPool>& pool() const { return pool_; }

 private:
  const std::shared_ptr<PinnedPool> pool_;
  const Span span_;
  const std::uint64_t round_;
  FreeSpans::node_type back_;  // what gives the span back needs no memory
};

class Lease {
 public:
  Lease() = default;
  Lease(Lease&&) noexcept = default;
  Lease& operator=(Lease&&) noexcept = default;

  explicit operator bool() const { return static_cast<bool>(claim_); }
  Span span() const { return claim_ ? claim_->span() : Span{}; }
  // Gives the memory back when the last transfer that uses it has ended. A second call does
  // nothing.
  void release() { claim_.reset(); }

  // Returns what a transfer holds until it ends. Null after `release`.
  std::shared_ptr<void> hold() const;

 private:
  friend class PinnedPool;
  explicit Lease(std::shared_ptr<Claim> claim) : claim_(std::move(claim)) {}

  std::shared_ptr<Claim> claim_;
};

class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  explicit PinnedPool(std::shared_ptr<Region> region);
  ~PinnedPool() = default;

  // Leases the first free span that is long enough. Returns an empty Lease if there is none.
  Lease try_lease(std::size_t nbytes);

  // Waits until a transfer gives memory back, or for `seconds`. Returns false if no transfer holds
  // any.
  bool wait_for_transfer(double seconds);

  // Takes every lease back, also those still held: recovery has given their holders up.
  // Precondition: no transfer uses the memory.
  void take_back_all();

  std::size_t capacity_nbytes() const { return region_->nbytes(); }
  std::size_t leased_nbytes() const;
  std::size_t peak_nbytes() const;
  const std::shared_ptr<Region>& region() const { return region_; }

 private:
  friend class Claim;
  friend class Lease;
  void give_back(FreeSpans::node_type span, std::uint64_t round) noexcept;
  void end_transfer();

  const int process_ = getpid();
  mutable Mutex mutex_;
  std::condition_variable came_back_;
  const std::shared_ptr<Region> region_;
  FreeSpans free_ INFINITY_GUARDED_BY(mutex_);
  std::size_t leased_nbytes_ INFINITY_GUARDED_BY(mutex_) = 0;
  std::size_t peak_nbytes_ INFINITY_GUARDED_BY(mutex_) = 0;
  std::size_t transfers_ INFINITY_GUARDED_BY(mutex_) = 0;  // that hold a claim
  std::uint64_t ended_ INFINITY_GUARDED_BY(mutex_) = 0;  // transfers that did
  // counts take_back_all: older claims give nothing back
  std::uint64_t round_ INFINITY_GUARDED_BY(mutex_) = 0;
};

}  // namespace infinity
