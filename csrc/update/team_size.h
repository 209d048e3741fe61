// TeamSize: how many of a pool's threads step a chunk, by what was measured. More threads than the
// memory feeds, or than there are cores for, are slower than fewer: two that share one core, say.
//
//   candidate   a size that is tried: all threads, half of them, a quarter, ..., one
//   trial       one chunk with each candidate, from all threads on, for as long as fewer are not
//   slower
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace infinity {

class TeamSize {
 public:
  static constexpr std::size_t kLeastElements = 1 << 18;  // of a chunk whose time tells anything
  // of which the best time of each candidate counts
  static constexpr int kTrials = 3;
  // until they are tried again: a machine's other work comes and goes
  static constexpr int kChunksBetween = 1024;
  // times as fast, below which fewer threads do
  static constexpr double kWorthIt = 1.03;

  explicit TeamSize(int most) : chosen_(most) {
    for (int size = most; size >= 1; size /= 2) rates_.push_back({size, 0});
  }

  // Threads for the next chunk of this many elements.
  int next(std::size_t elements) const {
    return elements < kLeastElements || is_settled() ? chosen_ : rates_[candidate_].size;
  }

  // Notes what a chunk took with as many threads as next() said.
  void note(std::size_t elements, double seconds) {
    if (rates_.size() == 1 || elements < kLeastElements || seconds <= 0) return;
    if (is_settled()) {
      if (++chunks_ == kChunksBetween) begin();
      return;
    }
    Rate& tried = rates_[candidate_];
    tried.rate = std::max(tried.rate, static_cast<double>(elements) / seconds);
    const bool is_slower = candidate_ > 0 && tried.rate * kWorthIt < rates_[candidate_ - 1].rate;
    if (!is_slower && candidate_ + 1 < rates_.size()) {
      ++candidate_;
      return;
    }
    candidate_ = 0;
    if (++trials_ == kTrials) choose();
  }

 private:
  struct Rate {
    int size;
    double rate;  // elements a second, the best so far
  };

  bool is_settled() const { return rates_.size() == 1 || trials_ == kTrials; }

  void begin() {
    for (Rate& each : rates_) each.rate = 0;
    candidate_ = 0;
    trials_ = chunks_ = 0;
  }

  // The fewest threads than which no other number is worth more.
  void choose() {
    double best = 0;
    for (const Rate& each : rates_) best = std::max(best, each.rate);
    for (const Rate& each : rates_)
      if (each.rate * kWorthIt >= best) chosen_ = each.size;
  }

  std::vector<Rate> rates_;
  std::size_t candidate_ = 0;
  int trials_ = 0, chunks_ = 0, chosen_;
};

}  // namespace infinity
