// The fault wrapper: any backend, with seeded faults between it and the engine.
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "tests/doubles/doubles.h"

namespace infinity::doubles {
namespace {

// SplitMix64: one well-mixed word per (seed, number, fault), the same on every machine.
std::uint64_t mix(std::uint64_t word) {
  word += 0x9E3779B97F4A7C15;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
  return word ^ (word >> 31);
}

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> inner, FaultPlan plan, std::shared_ptr<FaultSwitch> its)
      : inner_(std::move(inner)), plan_(plan), its_(std::move(its)) {}

  const char* name() const override { return inner_->name(); }

  void start(std::uint32_t id, const Piece& piece, int descriptor) override {
    const bool meant = its_->on && (plan_.file < 0 || piece.file == plan_.file);
    const std::uint64_t number = meant ? number_++ : 0;
    const bool on = meant && static_cast<std::int64_t>(number) >= plan_.first_piece;
    const bool write = piece.op == Op::kWrite;
    if (on && chance(number, 1, plan_.eio, its_->eio)) return answer(id, -EIO);
    if (on && chance(number, 10, plan_.hang, its_->hang)) {
      std::lock_guard<std::mutex> lock(mutex_);
      started_.erase(id);
      return;
    }
    if (on && write && chance(number, 2, plan_.enospc, its_->enospc)) return answer(id, -ENOSPC);
    if (on && write && chance(number, 11, plan_.read_only, its_->read_only))
      return answer(id, -EROFS);
    if (on && write && chance(number, 3, plan_.lost_write, its_->lost_write))
      return answer(id, static_cast<std::int64_t>(piece.nbytes));

    Piece sent = piece;
    if (on && piece.nbytes > kBlockNbytes &&
        chance(number, 4, plan_.short_transfer, its_->short_transfer))
      sent.nbytes = kBlockNbytes * (1 + draw(number, 5) % (piece.nbytes / kBlockNbytes - 1 + 1));
    if (sent.nbytes > piece.nbytes) sent.nbytes = piece.nbytes;
    const bool torn = on && write && piece.nbytes > kBlockNbytes &&
                      chance(number, 12, plan_.torn_write, its_->torn_write);
    if (torn) sent.nbytes = kBlockNbytes;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Started& started = started_[id];
      started = {};
      started.piece = sent;
      started.told = torn ? static_cast<std::int64_t>(piece.nbytes) : 0;
      started.delayed = on && chance(number, 6, plan_.delay, its_->delay);
      started.held_back = on && chance(number, 7, plan_.reorder, its_->reorder);
      if (on && !write && chance(number, 8, plan_.bit_flip, its_->bit_flip))
        started.flip = 1 + draw(number, 9) % (sent.nbytes * 8);
      ++inside_;
    }
    inner_->start(id, sent, descriptor);
  }

  void add_queue(const std::string& device) override { inner_->add_queue(device); }
  void flush() override { inner_->flush(); }

  void wait(std::vector<PieceResult>& results, double seconds) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      results.insert(results.end(), answered_.begin(), answered_.end());
      answered_.clear();
    }
    if (!results.empty()) return;
    std::vector<PieceResult> arrived;
    inner_->wait(arrived, seconds);
    std::lock_guard<std::mutex> lock(mutex_);
    for (PieceResult& result : arrived) {
      Started& started = started_[result.id];
      --inside_;
      if (started.told && result.result > 0) result.result = started.told;
      if (started.flip && result.result > 0) {
        const std::uint64_t bit =
            (started.flip - 1) % (static_cast<std::uint64_t>(result.result) * 8);
        started.piece.data[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
      }
      if (started.delayed)
        std::this_thread::sleep_for(std::chrono::duration<double>(plan_.delay_seconds));
      (started.held_back ? held_ : results).push_back(result);
    }
    results.insert(results.end(), answered_.begin(), answered_.end());
    answered_.clear();
    // What is held back goes out behind a later result; with nothing left inside there is none to
    // wait for.
    if (!results.empty() || inside_ == 0) {
      results.insert(results.end(), held_.begin(), held_.end());
      held_.clear();
    }
  }

  void wake() override { inner_->wake(); }
  std::vector<std::uint32_t> queued() override { return inner_->queued(); }
  bool take_back(std::uint32_t id) override {
    const bool taken = inner_->take_back(id);
    std::lock_guard<std::mutex> lock(mutex_);
    inside_ -= taken;
    return taken;
  }
  void give_up(std::uint32_t id) noexcept override {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool inside = started_.count(id) != 0;  // else no thread of the inner one waits for it
    lock.unlock();
    if (inside) inner_->give_up(id);
  }
  void abandon() override { inner_->abandon(); }
  std::string register_files(const std::vector<int>& files) override {
    return inner_->register_files(files);
  }
  std::string register_buffers(const std::vector<Span>& spans) override {
    return inner_->register_buffers(spans);
  }
  void forget_file(int file) override { inner_->forget_file(file); }

 private:
  struct Started {
    Piece piece;
    bool delayed = false;
    bool held_back = false;
    std::uint64_t flip = 0;  // 1 + the bit to flip
    std::int64_t told = 0;  // the bytes that a torn write is said to have moved
  };

  std::uint64_t draw(std::uint64_t number, std::uint64_t fault) const {
    return mix(plan_.seed ^ mix(number * 16 + fault));
  }
  bool chance(std::uint64_t number, std::uint64_t fault, double probability,
              std::atomic<std::int64_t>& struck) const {
    const bool strikes =
        probability > 0 && static_cast<double>(draw(number, fault) >> 11) * 0x1p-53 < probability;
    struck += strikes;
    return strikes;
  }
  void answer(std::uint32_t id, std::int64_t result) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      answered_.push_back({id, result});
    }
    inner_->wake();
  }

  std::unique_ptr<Backend> inner_;
  const FaultPlan plan_;
  const std::shared_ptr<FaultSwitch> its_;
  std::uint64_t number_ = 0;
  std::mutex mutex_;
  std::map<std::uint32_t, Started> started_;
  std::vector<PieceResult> answered_, held_;
  int inside_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> inner, FaultPlan plan,
                                             std::shared_ptr<FaultSwitch> its) {
  return std::make_unique<FaultyBackend>(std::move(inner), plan, std::move(its));
}

}  // namespace infinity::doubles
