// PinnedPool: leases of any size out of one Region. Lease: a move-only claim on a span, given back when nobody uses it.
//
// A transfer that uses a lease's memory holds the claim too (`hold`), so a lease that is dropped while the disk still
// moves its bytes is given back when that is over, and not before. Whoever leases next never meets a late read.
//
// Sizes are rounded to 4096 bytes and never to powers of two, so a small tensor takes a small slot. Neighbouring
// free spans merge at once. The pool never grows: a lease that does not fit is refused, and the caller decides
// what to give up for it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include <unistd.h>

#include "base/span.h"
#include "memory/region.h"

namespace infinity {

class PinnedPool;

// A span of a pool, taken. The last holder gives it back.
class Claim {
 public:
  Claim(std::shared_ptr<PinnedPool> pool, Span span, std::uint64_t round)
      : pool_(std::move(pool)), span_(span), round_(round) {}
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  Span span() const { return span_; }
  const std::shared_ptr<PinnedPool>& pool() const { return pool_; }

 private:
  const std::shared_ptr<PinnedPool> pool_;
  const Span span_;
  const std::uint64_t round_;
};

class Lease {
 public:
  Lease() = default;
  Lease(Lease&&) noexcept = default;
  Lease& operator=(Lease&&) noexcept = default;

  explicit operator bool() const { return static_cast<bool>(claim_); }
  Span span() const { return claim_ ? claim_->span() : Span{}; }
  // Gives the memory back, once no transfer uses it any more. A second call does nothing.
  void release() { claim_.reset(); }

  // What a transfer keeps until it is over. Null after `release`.
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

  // First fit. An empty Lease when no free span is long enough.
  Lease try_lease(std::size_t nbytes);

  // Waits until memory comes back that only a transfer holds, or for `seconds`. False when no transfer holds any.
  bool wait_for_transfer(double seconds);

  // Takes every lease back, whoever has it: what held one was given up. Only while no transfer uses the memory.
  void take_back_all();

  std::size_t capacity_nbytes() const { return region_->nbytes(); }
  std::size_t leased_nbytes() const;
  std::size_t peak_nbytes() const;
  const std::shared_ptr<Region>& region() const { return region_; }

 private:
  friend class Claim;
  friend class Lease;
  void give_back(Span span, std::uint64_t round);
  void end_transfer();

  const int process_ = getpid();
  mutable std::mutex mutex_;
  std::condition_variable came_back_;
  std::shared_ptr<Region> region_;
  std::map<std::size_t, std::size_t> free_;  // offset -> nbytes
  std::size_t leased_nbytes_ = 0;
  std::size_t peak_nbytes_ = 0;
  std::size_t transfers_ = 0;  // that hold a claim
  std::uint64_t ended_ = 0;    // transfers that did
  std::uint64_t round_ = 0;    // counts take_back_all: older claims are of no account
};

}  // namespace infinity
