// The instant backend: reports every piece as moved, and moves nothing.
//
// Below the modelled backend it stands for disks that cost the processor nothing, as a drive with
// DMA does: the rates can exceed what copies on this machine reach. Space that was never written
// reads as zeros, which is what untouched memory holds.
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "tests/doubles/doubles.h"

namespace infinity::doubles {
namespace {

class InstantBackend final : public Backend {
 public:
  const char* name() const override { return "instant"; }

  void start(std::uint32_t id, const Piece& piece, int) override {
    std::lock_guard<std::mutex> lock(mutex_);
    moved_.push_back({id, static_cast<std::int64_t>(piece.nbytes)});
    changed_.notify_one();
  }

  void wait(std::vector<PieceResult>& results, double seconds) override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                      [this] { return woken_ || !moved_.empty(); });
    woken_ = false;
    results.insert(results.end(), moved_.begin(), moved_.end());
    moved_.clear();
  }

  void wake() override {
    std::lock_guard<std::mutex> lock(mutex_);
    woken_ = true;
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<PieceResult> moved_;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_instant_backend() { return std::make_unique<InstantBackend>(); }

}  // namespace infinity::doubles
