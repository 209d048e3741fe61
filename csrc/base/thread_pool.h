// ThreadPool: a fork-join pool. The caller works too, so a pool of one has no threads of its own.
// If the system refuses a thread, the pool goes on with those it has.
//
// Thread safety: one thread at a time may call `run` or `for_range`; `work` must not call them
// either. `thread_count` is safe at any time: the workers do not change after the constructor.
// Ownership: the pool owns its threads, and joins them in its destructor. `work` stays the
// caller's: both calls return after its last use.
// `mutex_` guards the members marked so. It is never held while `work` runs: there is no lock
// order.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

#include "base/thread_safety.h"

namespace infinity {

class ThreadPool {
 public:
  explicit ThreadPool(int thread_count);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int thread_count() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs work(part) for part in [0, thread_count()) and returns when all are done. `work` must not
  // throw.
  void run(const std::function<void(int part)>& work);

  // Splits [begin, end) into pieces, a few per thread, cut at multiples of `grain` from `begin`,
  // and runs work(begin, end) on each. `most`: threads that take pieces, 0 for all.
  void for_range(std::size_t begin, std::size_t end, std::size_t grain,
                 const std::function<void(std::size_t, std::size_t)>& work, int most = 0);

 private:
  void worker(int part);

  std::vector<std::thread> workers_;
  Mutex mutex_;
  std::condition_variable start_, finish_;
  const std::function<void(int)>* work_ INFINITY_GUARDED_BY(mutex_) = nullptr;
  std::size_t round_ INFINITY_GUARDED_BY(mutex_) = 0;
  int running_ INFINITY_GUARDED_BY(mutex_) = 0;
  bool stopping_ INFINITY_GUARDED_BY(mutex_) = false;
};

}  // namespace infinity
