#include "memory/pool.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace infinity {

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::move(other.pool_);
    span_ = std::exchange(other.span_, Span{});
  }
  return *this;
}

void Lease::release() {
  if (auto pool = std::exchange(pool_, nullptr)) pool->give_back(std::exchange(span_, Span{}));
}

PinnedPool::PinnedPool(std::shared_ptr<Region> region) : region_(std::move(region)) {
  INFINITY_REQUIRE(region_, "a pool needs a region");
  free_.emplace(0, region_->nbytes());
}

Lease PinnedPool::try_lease(std::size_t nbytes) {
  INFINITY_REQUIRE(nbytes > 0, "a lease needs at least one byte");
  INFINITY_REQUIRE(nbytes <= capacity_nbytes(), "a lease of ", nbytes, " bytes can never fit a pool of ",
                   capacity_nbytes(), " bytes");
  const std::size_t wanted = round_up(nbytes, kBlockNbytes);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, size] = *it;
    if (size < wanted) continue;
    free_.erase(it);
    if (size > wanted) free_.emplace(offset + wanted, size - wanted);
    leased_nbytes_ += wanted;
    peak_nbytes_ = std::max(peak_nbytes_, leased_nbytes_);
    return Lease(shared_from_this(), Span{region_->data() + offset, wanted});
  }
  return Lease();
}

void PinnedPool::give_back(Span span) {
  std::lock_guard<std::mutex> lock(mutex_);
  leased_nbytes_ -= span.nbytes;
  std::size_t offset = span.data - region_->data();
  std::size_t size = span.nbytes;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

std::size_t PinnedPool::leased_nbytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return leased_nbytes_;
}

std::size_t PinnedPool::peak_nbytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_nbytes_;
}

}  // namespace infinity
