// WorkQueue: jobs that a few threads do in the order in which they came, those that somebody waits for first. Threads start as there is
// work for them. Where the system has none to give, who brings a job does it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace infinity {

class WorkQueue {
 public:
  using Job = std::function<void()>;  // must not throw

  explicit WorkQueue(int thread_count);
  ~WorkQueue() { stop(); }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Has `job` done. `awaited`: somebody waits for it.
  void add(Job job, bool awaited);

  // Does what is there, then ends the threads. Nothing is added afterwards.
  void stop();

 private:
  void worker();

  std::size_t most_;  // threads
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable told_;
  std::deque<Job> awaited_, others_;
  std::size_t idle_ = 0;  // workers that wait
  bool stopping_ = false;
};

}  // namespace infinity
