#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "base/rounding.h"
#include "base/span.h"
#include "base/spawn.h"

namespace infinity {
namespace {
constexpr std::size_t kPiecesPerThread = 8;
}

ThreadPool::ThreadPool(int thread_count) {
  INFINITY_REQUIRE(thread_count >= 1, "a thread pool needs at least one thread, not ",
                   thread_count);
  // Fewer threads do the same work: each takes the next piece.
  for (int part = 1; part < thread_count; ++part)
    if (!try_spawn(workers_, [this, part] { worker(part); })) break;
}

ThreadPool::~ThreadPool() {
  {
    Lock lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (auto& thread : workers_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& work) {
  if (workers_.empty()) return work(0);
  {
    Lock lock(mutex_);
    work_ = &work;
    running_ = static_cast<int>(workers_.size());
    ++round_;
  }
  start_.notify_all();
  work(0);
  Lock lock(mutex_);
  finish_.wait(lock, [this]() INFINITY_REQUIRES(mutex_) { return running_ == 0; });
}

void ThreadPool::for_range(std::size_t begin, std::size_t end, std::size_t grain,
                           const std::function<void(std::size_t, std::size_t)>& work, int most) {
  if (begin >= end) return;
  const std::size_t count = end - begin;
  if (workers_.empty() || most == 1 || count <= grain) return work(begin, end);
  // More pieces than threads, taken one by one: a thread whose core is busy elsewhere delays no
  // other.
  const std::size_t pieces = kPiecesPerThread * static_cast<std::size_t>(thread_count());
  const std::size_t share = round_up((count + pieces - 1) / pieces, grain);
  std::atomic<std::size_t> next{0};
  const auto take_pieces = [&](int part) {
    if (most > 0 && part >= most) return;
    for (std::size_t from; (from = begin + share * next++) < end;)
      work(from, std::min(end, from + share));
  };
  run(std::cref(take_pieces));  // which needs no memory
}

void ThreadPool::worker(int part) {
  use_default_rounding();
  std::size_t seen = 0;
  Lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&]() INFINITY_REQUIRES(mutex_) { return stopping_ || round_ != seen; });
    if (stopping_) return;
    seen = round_;
    const auto* work = work_;
    lock.unlock();
    (*work)(part);
    lock.lock();
    if (--running_ == 0) finish_.notify_one();
  }
}

}  // namespace infinity
