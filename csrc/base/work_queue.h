// WorkQueue: jobs that a few threads do in the order of submission, awaited ones first. Threads
// start when there is work for them. As long as the system refuses the first thread, the caller of
// `add` does the job.
//
// Thread safety: `add` may be called from any thread, also from a job, but not after `stop`. `stop`
// is called by one thread, which is none of the queue's.
// Ownership: the queue owns its threads and the jobs; a job is destroyed before the next one
// starts.
// `mutex_` guards the members marked so. No job runs with it held: there is no lock order.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "base/thread_safety.h"

namespace infinity {

class WorkQueue {
 public:
  using Job = std::function<void()>;  // must not throw

  explicit WorkQueue(int thread_count);
  ~WorkQueue() { stop(); }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Queues `job`, or runs it at once if there is no thread. `awaited`: a thread waits for it.
  void add(Job job, bool awaited);

  // Finishes the queued jobs, then ends the threads. Nothing may be added afterwards.
  void stop();

 private:
  void worker();

  Mutex mutex_;
  std::condition_variable changed_;
  const std::size_t max_threads_;
  std::vector<std::thread> workers_;  // grows under mutex_; `stop` joins them after the last `add`
  std::deque<Job> awaited_ INFINITY_GUARDED_BY(mutex_), others_ INFINITY_GUARDED_BY(mutex_);
  std::size_t idle_ INFINITY_GUARDED_BY(mutex_) = 0;  // workers that wait
  bool stopping_ INFINITY_GUARDED_BY(mutex_) = false;
};

}  // namespace infinity
