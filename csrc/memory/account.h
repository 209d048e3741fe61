// Account: the bytes that are charged to one tier, and its limit. Charge: some of them, for as long
// as it lives.
//
// A charge is made in one step that no exception can interrupt, and given back when its last owner
// drops it. So no bytes stay charged without an owner. Passing charges are those of a running
// forward or backward: they are forgotten together when it is given up, even if objects still refer
// to them.
//
// Thread safety: every member function may be called from any thread; `planned` and `budget` are
// set while no charge is made. `mutex_` guards the members marked so, and is a leaf.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/thread_safety.h"

namespace infinity {

class Account;

class Charge {
 public:
  Charge(std::shared_ptr<Account> account, std::int64_t nbytes, bool passing, std::uint64_t round)
      : account_(std::move(account)), nbytes_(nbytes), passing_(passing), round_(round) {}
  ~Charge() { release(); }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

  std::int64_t nbytes() const { return nbytes_; }
  // Gives the bytes back; a second call does nothing.
  void release();

 private:
  std::shared_ptr<Account> account_;
  const std::int64_t nbytes_;
  const bool passing_;
  const std::uint64_t round_;
};

class Account : public std::enable_shared_from_this<Account> {
 public:
  // Null, with nothing charged, when over the budget.
  std::shared_ptr<Charge> charge(std::int64_t nbytes, bool passing) {
    Lock lock(mutex_);
    const std::int64_t wanted = charged_ + nbytes;
    if (budget && wanted > *budget) return nullptr;
    auto made = std::make_shared<Charge>(shared_from_this(), nbytes, passing, round_);
    charged_ = wanted;
    if (passing) passing_ += nbytes;
    peak_ = std::max(peak_, wanted);
    return made;
  }

  void forget_passing() {
    Lock lock(mutex_);
    charged_ -= passing_;
    passing_ = 0;
    ++round_;
  }

  std::int64_t charged() const {
    Lock lock(mutex_);
    return charged_;
  }
  std::int64_t peak() const {
    Lock lock(mutex_);
    return peak_;
  }

  std::int64_t planned = 0;
  std::optional<std::int64_t> budget;

 private:
  friend class Charge;
  void give_back(std::int64_t nbytes, bool passing, std::uint64_t round) {
    Lock lock(mutex_);
    if (passing && round != round_) return;
    charged_ -= nbytes;
    if (passing) passing_ -= nbytes;
  }

  mutable Mutex mutex_;
  std::int64_t charged_ INFINITY_GUARDED_BY(mutex_) = 0, peak_ INFINITY_GUARDED_BY(mutex_) = 0;
  std::int64_t passing_ INFINITY_GUARDED_BY(mutex_) = 0;  // of charged_
  std::uint64_t round_ INFINITY_GUARDED_BY(mutex_) = 0;  // counts forget_passing
};

inline void Charge::release() {
  if (auto account = std::exchange(account_, nullptr))
    account->give_back(nbytes_, passing_, round_);
}

}  // namespace infinity
