#include "base/work_queue.h"

#include <utility>

#include "base/check.h"
#include "base/spawn.h"

namespace infinity {

WorkQueue::WorkQueue(int thread_count) : max_threads_(static_cast<std::size_t>(thread_count)) {
  INFINITY_REQUIRE(thread_count >= 1, "a work queue needs at least one thread, not ", thread_count);
}

void WorkQueue::add(Job job, bool awaited) {
  {
    Lock lock(mutex_);
    INFINITY_CHECK(!stopping_, "work for a queue that was stopped");
    const std::size_t waiting = awaited_.size() + others_.size() + 1;
    if (waiting > idle_ && workers_.size() < max_threads_)  // refused, the next job tries again
      (void)try_spawn(workers_, [this] { worker(); });
    if (!workers_.empty()) {
      (awaited ? awaited_ : others_).push_back(std::move(job));
      changed_.notify_one();
      return;
    }
  }
  job();
}

void WorkQueue::stop() {
  {
    Lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (auto& thread : workers_) thread.join();
  workers_.clear();
}

void WorkQueue::worker() {
  Lock lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait(lock, [this]() INFINITY_REQUIRES(mutex_) {
      return stopping_ || !awaited_.empty() || !others_.empty();
    });
    --idle_;
    std::deque<Job>& jobs = awaited_.empty() ? others_ : awaited_;
    if (jobs.empty()) return;  // stopping
    {
      const Job job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job();
    }
    lock.lock();
  }
}

}  // namespace infinity
