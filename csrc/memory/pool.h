// PinnedPool: leases of any size out of one Region. Lease: a move-only claim on a span, given back when it dies.
//
// Sizes are rounded to 4096 bytes and never to powers of two, so a small tensor takes a small slot. Neighbouring
// free spans merge at once. The pool never grows: a lease that does not fit is refused, and the caller decides
// what to give up for it.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "base/span.h"
#include "memory/region.h"

namespace infinity {

class PinnedPool;

class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept { *this = std::move(other); }
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { release(); }

  explicit operator bool() const { return static_cast<bool>(pool_); }
  Span span() const { return span_; }
  void release();

 private:
  friend class PinnedPool;
  Lease(std::shared_ptr<PinnedPool> pool, Span span) : pool_(std::move(pool)), span_(span) {}

  std::shared_ptr<PinnedPool> pool_;
  Span span_;
};

class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  explicit PinnedPool(std::shared_ptr<Region> region);
  ~PinnedPool() = default;

  // First fit. An empty Lease when no free span is long enough.
  Lease try_lease(std::size_t nbytes);

  std::size_t capacity_nbytes() const { return region_->nbytes(); }
  std::size_t leased_nbytes() const;
  std::size_t peak_nbytes() const;
  const std::shared_ptr<Region>& region() const { return region_; }

 private:
  friend class Lease;
  void give_back(Span span);

  mutable std::mutex mutex_;
  std::shared_ptr<Region> region_;
  std::map<std::size_t, std::size_t> free_;  // offset -> nbytes
  std::size_t leased_nbytes_ = 0;
  std::size_t peak_nbytes_ = 0;
};

}  // namespace infinity
