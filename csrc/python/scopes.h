// Scopes: what of an engine runs on the stack just now, told by the stack itself.
//
// A scope is entered and left in one step each, which no signal handler can come between, and left however the block inside
// ends. So whether something is running never has to be guessed from what an exception may have left behind. What was pushed
// on torch's stack of saved-tensor hooks inside a scope is popped when it is left.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <thread>
#include <unordered_map>

namespace infinity {

namespace py = pybind11;

class Scopes {
 public:
  // torch's own functions: this core knows nothing of torch.
  Scopes(py::object push, py::object pop) : push_(std::move(push)), pop_(std::move(pop)) {}

  // Pushes a pair of hooks, to be popped when this thread's innermost scope is left, or before.
  void push_hooks(const py::object& pack, const py::object& unpack) {
    int& count = hooks_[std::this_thread::get_id()];
    push_(pack, unpack);
    ++count;
  }

  int hooks() const {
    const auto found = hooks_.find(std::this_thread::get_id());
    return found == hooks_.end() ? 0 : found->second;
  }

  // Pops this thread's hooks until `count` are left.
  void pop_hooks(int count) {
    for (int left = hooks(); left > count; --left) {
      hooks_[std::this_thread::get_id()] = left - 1;
      pop_();
    }
  }

  int running = 0;           // scopes that are entered
  bool interrupted = false;  // whether an exception left all of them, or struck inside

 private:
  const py::object push_, pop_;
  std::unordered_map<std::thread::id, int> hooks_;
};

// One use of a `with` statement, inside which a pair of hooks may be pushed from the start.
class Scope {
 public:
  explicit Scope(std::shared_ptr<Scopes> scopes, py::object pack = py::none(), py::object unpack = py::none())
      : scopes_(std::move(scopes)), pack_(std::move(pack)), unpack_(std::move(unpack)) {}

  void enter() {
    hooks_ = scopes_->hooks();
    if (!pack_.is_none()) scopes_->push_hooks(pack_, unpack_);
    ++scopes_->running;
    entered_ = true;
  }

  void leave(const py::object& kind) {
    if (!entered_) return;
    entered_ = false;
    --scopes_->running;
    if (!kind.is_none() && (scopes_->running == 0 || !may_be_handled(kind))) scopes_->interrupted = true;
    scopes_->pop_hooks(hooks_);
  }

  // An ordinary exception of a part may be caught by the whole: it is one only if it leaves that too. What strikes anywhere is one.
  static bool may_be_handled(const py::object& kind) {
    return PyObject_IsSubclass(kind.ptr(), PyExc_Exception) == 1 && PyObject_IsSubclass(kind.ptr(), PyExc_MemoryError) == 0;
  }

  ~Scope() {  // of a generator that was never finished, say
    if (entered_) --scopes_->running;
  }

 private:
  const std::shared_ptr<Scopes> scopes_;
  const py::object pack_, unpack_;
  int hooks_ = 0;
  bool entered_ = false;
};

// Calls what must be done to its end: once more when an exception cut it short, up to `tries` times in all. What is called
// begins anew each time. An error of the engine's own, which would only come again, ends it. Raises the first exception when it is
// done, or cannot be.
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
