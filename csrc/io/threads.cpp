// The thread backend: pread and pwrite on a few threads, for kernels and containers without io_uring.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/spawn.h"
#include "io/backend.h"

namespace infinity {
namespace {

class ThreadsBackend final : public Backend {
 public:
  explicit ThreadsBackend(int thread_count) {
    for (int i = 0; i < thread_count; ++i)
      if (!add_thread()) break;  // with fewer, pieces wait for each other
    if (threads_.empty())
      throw StorageError(EAGAIN, "", "the system refuses a thread for I/O (a limit on processes: `ulimit -u`, or the container's pids)");
  }

  ~ThreadsBackend() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    queued_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  const char* name() const override { return "threads"; }

  void start(std::uint32_t id, const Piece& piece, int descriptor) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back({id, piece, descriptor});
    }
    queued_.notify_one();
  }

  std::vector<std::uint32_t> queued() override {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::uint32_t> ids;
    for (const Job& job : queue_) ids.push_back(job.id);
    return ids;
  }

  bool take_back(std::uint32_t id) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto job = std::find_if(queue_.begin(), queue_.end(), [id](const Job& each) { return each.id == id; });
    if (job == queue_.end()) return false;
    queue_.erase(job);
    return true;
  }

  // Its thread may wait for ever: another takes its place, so that other disks go on.
  void give_up(std::uint32_t) override { (void)add_thread(); }

  void abandon() override {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.clear();
    stopping_ = true;
    queued_.notify_all();
    for (auto& thread : threads_) thread.detach();
  }

  void wait(std::vector<PieceResult>& results, double seconds) override {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return woken_ || !results_.empty(); });
    woken_ = false;
    results.insert(results.end(), results_.begin(), results_.end());
    results_.clear();
  }

  void wake() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    finished_.notify_one();
  }

 private:
  struct Job {
    std::uint32_t id;
    Piece piece;
    int descriptor;
  };

  bool add_thread() {
    return try_spawn(threads_, [this] { work(); });
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      queued_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      const Job job = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const Piece& piece = job.piece;
      const ssize_t moved = piece.op == Op::kRead
                                ? pread(job.descriptor, piece.data, piece.nbytes, static_cast<off_t>(piece.offset))
                                : pwrite(job.descriptor, piece.data, piece.nbytes, static_cast<off_t>(piece.offset));
      const std::int64_t result = moved < 0 ? -static_cast<std::int64_t>(errno) : moved;
      lock.lock();
      results_.push_back({job.id, result});
      finished_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable queued_, finished_;
  std::deque<Job> queue_;
  std::vector<PieceResult> results_;
  bool stopping_ = false;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(int thread_count) {
  return std::make_unique<ThreadsBackend>(thread_count);
}

}  // namespace infinity
