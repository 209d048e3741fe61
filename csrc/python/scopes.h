// Scopes: what of an engine runs on the stack just now, told by the stack itself.
//
// A scope is entered and left in one step each, which no signal handler can come between, and left
// however the block inside ends. So whether something is running never has to be guessed from what
// an exception may have left behind. What was pushed on torch's stack of saved-tensor hooks inside
// a scope is popped when it is left.
//
// task    a run of autograd, told by an object that only autograd holds. Scopes and tasks of two
// threads never overlap: what a
//         thread begins first of all is counted only once no other thread has any.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace infinity {

namespace py = pybind11;

using Thread = unsigned long;  // as Python numbers it

inline Thread this_thread() { return PyThread_get_thread_ident(); }

class Scopes {
 public:
  // torch's own functions: this core knows nothing of torch.
  Scopes(py::object push, py::object pop) : push_(std::move(push)), pop_(std::move(pop)) {}

  // Pushes a pair of hooks, to be popped when this thread's innermost scope is left, or before.
  void push_hooks(const py::object& pack, const py::object& unpack) {
    int& count = hooks_[this_thread()];
    push_(pack, unpack);
    ++count;
  }

  int hooks() const {
    const auto found = hooks_.find(this_thread());
    return found == hooks_.end() ? 0 : found->second;
  }

  // Pops this thread's hooks until `count` are left.
  void pop_hooks(int count) {
    for (int left = hooks(); left > count; --left) {
      hooks_[this_thread()] = left - 1;
      pop_();
    }
  }

  // Scopes and tasks of one thread, or of all.
  struct Count {
    int scopes = 0, tasks = 0;
  };

  Count here() const {
    const auto found = of_threads_.find(this_thread());
    return found == of_threads_.end() ? Count{} : found->second;
  }

  // The threads that have scopes or tasks.
  std::vector<Thread> threads() const {
    std::vector<Thread> found;
    for (const auto& each : of_threads_) found.push_back(each.first);
    return found;
  }

  bool is_used_elsewhere() const {
    const Count mine = here();
    return running > mine.scopes || tasks > mine.tasks;
  }

  // True if this thread may not begin yet: another thread has scopes or tasks, or has waited for
  // longer.
  bool has_to_wait() const {
    if (is_used_elsewhere()) return true;
    const auto me = this_thread();
    const auto mine = std::find_if(waiting_.begin(), waiting_.end(),
                                   [me](const auto& each) { return each.second == me; });
    return mine != waiting_.end() && mine != waiting_.begin();
  }

  // Calls `wait` until this thread may begin, unless it has scopes or tasks. No other thread can
  // begin before what this one counts next.
  void wait_for_others(const py::object& wait) {
    const Count mine = here();
    if (wait.is_none() || mine.scopes > 0 || mine.tasks > 0) return;
    const Turn turn(*this);
    while (has_to_wait()) wait();
  }

  void count(Thread thread, int scopes, int tasks_too) {
    Count& of = of_threads_[thread];
    of.scopes += scopes, of.tasks += tasks_too;
    running += scopes, tasks += tasks_too;
    if (of.scopes == 0 && of.tasks == 0) of_threads_.erase(thread);
    ++changes;
  }

  int running = 0;  // scopes that are entered
  int tasks = 0;  // runs of autograd that were told of and are not over
  long changes = 0;  // how often one of either began or ended
  bool interrupted = false;  // an exception left all scopes, or is one that always counts

 private:
  // A place in the queue of threads that wait, given up however the wait ends.
  struct Turn {
    explicit Turn(Scopes& of) : scopes(of), number(of.next_turn_++) {
      scopes.waiting_.emplace(number, this_thread());
    }
    ~Turn() { scopes.waiting_.erase(number); }
    Scopes& scopes;
    const long number;
  };

  std::unordered_map<Thread, Count> of_threads_;
  std::map<long, Thread> waiting_;
  long next_turn_ = 0;
  const py::object push_, pop_;
  std::unordered_map<Thread, int> hooks_;
};

// Counts a run of autograd for as long as autograd holds this object, which it calls when the run
// is over. `wait`: as a scope's.
class Task {
 public:
  Task(std::shared_ptr<Scopes> scopes, const py::object& wait)
      : scopes_(std::move(scopes)), thread_(this_thread()) {
    scopes_->wait_for_others(wait);
    scopes_->count(thread_, 0, 1);
  }

  ~Task() { scopes_->count(thread_, 0, -1); }

 private:
  const std::shared_ptr<Scopes> scopes_;
  const Thread thread_;
};

// One use of a `with` statement, inside which a pair of hooks may be pushed from the start. On the
// way in `wait` is called while another thread has scopes or tasks, then `prepare`, when this one
// has the engine to itself.
class Scope {
 public:
  Scope(std::shared_ptr<Scopes> scopes, py::object pack, py::object unpack, py::object wait,
        py::object prepare)
      : scopes_(std::move(scopes)),
        pack_(std::move(pack)),
        unpack_(std::move(unpack)),
        wait_(std::move(wait)),
        prepare_(std::move(prepare)) {}

  void enter() {
    scopes_->wait_for_others(wait_);
    thread_ = this_thread();
    scopes_->count(thread_, 1, 0);
    try {
      if (!prepare_.is_none()) prepare_();
      hooks_ = scopes_->hooks();
      if (!pack_.is_none()) scopes_->push_hooks(pack_, unpack_);
    } catch (...) {
      scopes_->count(thread_, -1, 0);
      throw;
    }
    entered_ = true;
  }

  void leave(const py::object& kind) {
    if (!entered_) return;
    entered_ = false;
    scopes_->count(thread_, -1, 0);
    if (!kind.is_none() && (scopes_->running == 0 || !may_be_handled(kind)))
      scopes_->interrupted = true;
    scopes_->pop_hooks(hooks_);
  }

  // An `Exception` counts as an interrupt only if it leaves the outermost scope; KeyboardInterrupt,
  // SystemExit and MemoryError always do.
  static bool may_be_handled(const py::object& kind) {
    return PyObject_IsSubclass(kind.ptr(), PyExc_Exception) == 1 &&
           PyObject_IsSubclass(kind.ptr(), PyExc_MemoryError) == 0;
  }

  ~Scope() {  // of a generator that was never finished, say
    if (entered_) scopes_->count(thread_, -1, 0);
  }

 private:
  const std::shared_ptr<Scopes> scopes_;
  const py::object pack_, unpack_, wait_, prepare_;
  Thread thread_;
  int hooks_ = 0;
  bool entered_ = false;
};

// Calls what must be done to its end: once more when an exception cut it short, up to `tries` times
// in all. What is called begins anew each time. An error of the engine's own, which would only come
// again, ends it. Raises the first exception when it is done, or cannot be.
inline void insist(const py::object& work, int tries) {
  std::unique_ptr<py::error_already_set> first;
  for (int i = 0; i < tries; ++i) {
    try {
      work();
      break;
    } catch (py::error_already_set& error) {
      if (!first) first = std::make_unique<py::error_already_set>(error);
      if (error.matches(py::module_::import("infinity.errors").attr("InfinityError"))) break;
    }
  }
  if (first) throw py::error_already_set(*first);
}

}  // namespace infinity
