// The thread backend: pread and pwrite on a few threads for each device, for kernels and containers
// without io_uring.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <thread>

#include "base/check.h"
#include "base/spawn.h"
#include "base/thread_safety.h"
#include "io/backend.h"

namespace infinity {
namespace {

class ThreadsBackend final : public Backend {
 public:
  explicit ThreadsBackend(int thread_count) : thread_count_(thread_count) {
    queues_.emplace_back();
    if (!add_threads(queues_.front()))
      throw StorageError(EAGAIN, "",
                         "the system refuses a thread for I/O (a limit on processes: `ulimit -u`, "
                         "or the container's pids)");
  }

  ~ThreadsBackend() override {
    {
      Lock lock(mutex_);
      stopping_ = true;
    }
    for (Queue& queue : queues_) queue.queued.notify_all();
    for (Queue& queue : queues_)
      for (auto& thread : queue.threads) thread.join();
  }

  const char* name() const override { return "threads"; }

  // The first device gets the constructor's threads, and so does a device for which the system
  // refuses more.
  void add_queue(const std::string&) override {
    const bool first = queue_of_device_.empty();
    Lock lock(mutex_);
    queue_of_device_.reserve(queue_of_device_.size() + 1);
    Queue* queue = &queues_.front();
    if (!first) {
      Queue& added = queues_.emplace_back();
      lock.unlock();
      if (add_threads(added)) queue = &added;
      lock.lock();
    }
    queue_of_device_.push_back(queue);
  }

  void start(std::uint32_t id, const Piece& piece, int descriptor) override {
    Lock lock(mutex_);
    Queue& queue = *queue_of_device_.at(piece.queue);
    // Its thread has no way to say that there is no memory: it is taken here.
    std::list<Job> job{{id, piece, descriptor, &queue}};
    if (results_.capacity() <= started_) results_.reserve(2 * started_ + 1);
    ++started_;
    queue.jobs.splice(queue.jobs.end(), job);
    queue.queued.notify_one();
  }

  std::vector<std::uint32_t> queued() override {
    Lock lock(mutex_);
    std::vector<std::uint32_t> ids;
    for (const Queue& queue : queues_)
      for (const Job& job : queue.jobs) ids.push_back(job.id);
    return ids;
  }

  bool take_back(std::uint32_t id) override {
    Lock lock(mutex_);
    for (Queue& queue : queues_) {
      const auto job = std::find_if(queue.jobs.begin(), queue.jobs.end(),
                                    [id](const Job& each) { return each.id == id; });
      if (job == queue.jobs.end()) continue;
      queue.jobs.erase(job);
      --started_;
      return true;
    }
    return false;
  }

  // The piece's thread may wait for ever. Another one takes its place, so that the device's other
  // files go on.
  void give_up(std::uint32_t id) noexcept override {
    Lock lock(mutex_);
    const auto running = std::find_if(running_.begin(), running_.end(),
                                      [id](const Job& each) { return each.id == id; });
    if (running == running_.end()) return;
    Queue& queue = *running->queue;
    lock.unlock();
    (void)try_spawn(queue.threads, [this, &queue] { work(queue); });
  }

  void abandon() override {
    Lock lock(mutex_);
    stopping_ = true;
    for (Queue& queue : queues_) {
      queue.jobs.clear();
      queue.queued.notify_all();
      for (auto& thread : queue.threads) thread.detach();
    }
  }

  void wait(std::vector<PieceResult>& results, double seconds) override {
    Lock lock(mutex_);
    finished_.wait_for(lock, std::chrono::duration<double>(seconds),
                       [this]() INFINITY_REQUIRES(mutex_) { return woken_ || !results_.empty(); });
    woken_ = false;
    results.insert(results.end(), results_.begin(), results_.end());
    started_ -= results_.size();
    results_.clear();
  }

  void wake() override {
    {
      Lock lock(mutex_);
      woken_ = true;
    }
    finished_.notify_one();
  }

 private:
  struct Queue;
  struct Job {
    std::uint32_t id;
    Piece piece;
    int descriptor;
    Queue* queue;
  };

  struct Queue {  // of one device; stays at its address
    std::list<Job> jobs;
    std::condition_variable queued;
    std::vector<std::thread> threads;
  };

  // Returns false if the system refuses even one thread. With fewer than wanted, pieces wait
  // longer.
  bool add_threads(Queue& queue) {
    for (int i = 0; i < thread_count_; ++i)
      if (!try_spawn(queue.threads, [this, &queue] { work(queue); })) break;
    return !queue.threads.empty();
  }

  void work(Queue& queue) {
    Lock lock(mutex_);
    for (;;) {
      queue.queued.wait(
          lock, [&]() INFINITY_REQUIRES(mutex_) { return stopping_ || !queue.jobs.empty(); });
      if (stopping_) return;
      const auto job = queue.jobs.begin();
      running_.splice(running_.end(), queue.jobs, job);
      lock.unlock();
      const Piece& piece = job->piece;
      const ssize_t moved =
          piece.op == Op::kRead
              ? pread(job->descriptor, piece.data, piece.nbytes, static_cast<off_t>(piece.offset))
              : pwrite(job->descriptor, piece.data, piece.nbytes, static_cast<off_t>(piece.offset));
      const std::int64_t result = moved < 0 ? -static_cast<std::int64_t>(errno) : moved;
      lock.lock();
      results_.push_back({job->id, result});
      running_.erase(job);
      finished_.notify_one();
    }
  }

  const int thread_count_;
  Mutex mutex_;
  std::condition_variable finished_;
  // Grows in calls that the engine makes one at a time. mutex_ guards the jobs in it.
  std::deque<Queue> queues_;
  std::vector<Queue*> queue_of_device_;  // likewise
  std::list<Job> running_ INFINITY_GUARDED_BY(mutex_);
  std::vector<PieceResult> results_ INFINITY_GUARDED_BY(mutex_);  // with room for all of `started_`
  std::size_t started_ INFINITY_GUARDED_BY(mutex_) = 0;  // results that `wait` has not returned
  bool stopping_ INFINITY_GUARDED_BY(mutex_) = false;
  bool woken_ INFINITY_GUARDED_BY(mutex_) = false;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(int thread_count) {
  return std::make_unique<ThreadsBackend>(thread_count);
}

}  // namespace infinity
