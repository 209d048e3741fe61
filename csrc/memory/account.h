// Account: the bytes that are charged to one tier, and its limit. Charge: some of them, for as long as it lives.
//
// A charge is made and given back in one step that nothing can interrupt, and by whoever drops it last, so that no
// exception leaves bytes charged that nobody holds. Passing charges are those of a forward or backward that is running:
// when it is given up they are forgotten together, whoever still refers to one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

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
    std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t wanted = charged_ + nbytes;
    if (budget && wanted > *budget) return nullptr;
    auto made = std::make_shared<Charge>(shared_from_this(), nbytes, passing, round_);
    charged_ = wanted;
    if (passing) passing_ += nbytes;
    peak_ = std::max(peak_, wanted);
    return made;
  }

  void forget_passing() {
    std::lock_guard<std::mutex> lock(mutex_);
    charged_ -= passing_;
    passing_ = 0;
    ++round_;
  }

  std::int64_t charged() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return charged_;
  }
  std::int64_t peak() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_;
  }

  std::int64_t planned = 0;
  std::optional<std::int64_t> budget;

 private:
  friend class Charge;
  void give_back(std::int64_t nbytes, bool passing, std::uint64_t round) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (passing && round != round_) return;
    charged_ -= nbytes;
    if (passing) passing_ -= nbytes;
  }

  mutable std::mutex mutex_;
  std::int64_t charged_ = 0, peak_ = 0;
  std::int64_t passing_ = 0;  // of charged_
  std::uint64_t round_ = 0;   // counts forget_passing
};

inline void Charge::release() {
  if (auto account = std::exchange(account_, nullptr)) account->give_back(nbytes_, passing_, round_);
}

}  // namespace infinity
