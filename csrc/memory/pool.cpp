#include "memory/pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"

namespace infinity {

Claim::~Claim() { pool_->give_back(std::move(back_), round_); }

std::shared_ptr<void> Lease::hold() const {
  if (!claim_) return nullptr;
  {
    PinnedPool& pool = *claim_->pool();
    Lock lock(pool.mutex_);
    ++pool.transfers_;
  }
  // Drops the claim before the transfer counts as ended: a thread that waits for that finds the
  // memory free.
  return std::shared_ptr<void>(claim_.get(), [claim = claim_](void*) mutable {
    const std::shared_ptr<PinnedPool> pool = claim->pool();
    claim.reset();
    pool->end_transfer();
  });
}

PinnedPool::PinnedPool(std::shared_ptr<Region> region) : region_(std::move(region)) {
  INFINITY_REQUIRE(region_, "a pool needs a region");
  free_.emplace(0, region_->nbytes());
}

Lease PinnedPool::try_lease(std::size_t nbytes) {
  INFINITY_REQUIRE(nbytes > 0, "a lease needs at least one byte");
  INFINITY_REQUIRE(nbytes <= capacity_nbytes(), "a lease of ", nbytes,
                   " bytes can never fit a pool of ", capacity_nbytes(), " bytes");
  const std::size_t wanted = round_up(nbytes, kBlockNbytes);
  Lock lock(mutex_);
  const auto found = std::find_if(free_.begin(), free_.end(),
                                  [&](const auto& each) { return each.second >= wanted; });
  if (found == free_.end()) return Lease();
  const std::size_t offset = found->first;
  FreeSpans leased{{offset, wanted}};
  auto back = leased.extract(offset);
  auto claim = std::make_shared<Claim>(shared_from_this(), Span{region_->data() + offset, wanted},
                                       round_, std::move(back));
  auto rest = free_.extract(found);  // nothing can fail from here on
  rest.key() += wanted;
  rest.mapped() -= wanted;
  if (rest.mapped() > 0) free_.insert(std::move(rest));
  leased_nbytes_ += wanted;
  peak_nbytes_ = std::max(peak_nbytes_, leased_nbytes_);
  return Lease(std::move(claim));
}

bool PinnedPool::wait_for_transfer(double seconds) {
  Lock lock(mutex_);
  if (transfers_ == 0) return false;
  const std::uint64_t before = ended_;
  came_back_.wait_for(lock, std::chrono::duration<double>(seconds),
                      [&]() INFINITY_REQUIRES(mutex_) { return ended_ != before; });
  return true;
}

void PinnedPool::take_back_all() {
  Lock lock(mutex_);
  INFINITY_CHECK(transfers_ == 0, "leases taken back while ", transfers_, " transfers use them");
  FreeSpans all{{0, region_->nbytes()}};
  free_.swap(all);
  ++round_;
  leased_nbytes_ = 0;
}

void PinnedPool::end_transfer() {
  if (process_ != getpid()) return;
  {
    Lock lock(mutex_);
    --transfers_;
    ++ended_;
  }
  came_back_.notify_all();
}

void PinnedPool::give_back(FreeSpans::node_type span, std::uint64_t round) noexcept {
  // a forked child: the lock may be held by a thread that it does not have
  if (process_ != getpid()) return;
  Lock lock(mutex_);
  if (round != round_) return;
  leased_nbytes_ -= span.mapped();
  auto next = free_.lower_bound(span.key());
  if (next != free_.end() && span.key() + span.mapped() == next->first) {
    span.mapped() += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == span.key()) {
      before->second += span.mapped();
      return;
    }
  }
  free_.insert(std::move(span));
}

std::size_t PinnedPool::leased_nbytes() const {
  Lock lock(mutex_);
  return leased_nbytes_;
}

std::size_t PinnedPool::peak_nbytes() const {
  Lock lock(mutex_);
  return peak_nbytes_;
}

}  // namespace infinity
