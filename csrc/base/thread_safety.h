// Thread safety: which mutex guards what, in a form that clang checks (-Wthread-safety).
//
//   INFINITY_GUARDED_BY(mutex)   a member that is read and written under `mutex` only
//   INFINITY_REQUIRES(mutex)     a function, or a lambda, that is called with `mutex` held
//   INFINITY_EXCLUDES(mutex)     a function that is called without `mutex`: it takes it
//
// gcc ignores the attributes. Mutex and Lock are std::mutex and std::unique_lock with them, and
// work with std::condition_variable. A lambda that reads guarded members names its mutex too.
#pragma once

#include <mutex>

#if defined(__clang__)
#define INFINITY_THREAD_SAFETY(...) __attribute__((__VA_ARGS__))
#else
#define INFINITY_THREAD_SAFETY(...)
#endif
#define INFINITY_GUARDED_BY(mutex) INFINITY_THREAD_SAFETY(guarded_by(mutex))
#define INFINITY_REQUIRES(...) INFINITY_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define INFINITY_EXCLUDES(...) INFINITY_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define INFINITY_UNCHECKED INFINITY_THREAD_SAFETY(no_thread_safety_analysis)

namespace infinity {

class INFINITY_THREAD_SAFETY(capability("mutex")) Mutex : public std::mutex {
 public:
  void lock() INFINITY_THREAD_SAFETY(acquire_capability()) { std::mutex::lock(); }
  void unlock() INFINITY_THREAD_SAFETY(release_capability()) { std::mutex::unlock(); }
};

// Holds a mutex for as long as it lives, but for the time between unlock() and lock().
class INFINITY_THREAD_SAFETY(scoped_lockable) Lock : public std::unique_lock<std::mutex> {
 public:
  explicit Lock(Mutex& mutex) INFINITY_THREAD_SAFETY(acquire_capability(mutex))
      : std::unique_lock<std::mutex>(mutex) {}
  ~Lock() INFINITY_THREAD_SAFETY(release_capability()) {}
  void lock() INFINITY_THREAD_SAFETY(acquire_capability()) { std::unique_lock<std::mutex>::lock(); }
  void unlock() INFINITY_THREAD_SAFETY(release_capability()) {
    std::unique_lock<std::mutex>::unlock();
  }
};

}  // namespace infinity
