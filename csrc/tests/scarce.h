// Shortage: memory that runs out. The program's operator new (scarce.cpp) counts allocations while
// a call is made, and fails.
//
//   first     the number of allocations before the one that fails
//   lasting   all later ones fail too, until the call is over
//   others    those of other threads are counted, and fail, like the caller's
#pragma once

#include <cstddef>
#include <new>

#include "tests/test.h"

namespace infinity::tests {

class Shortage {
 public:
  Shortage(std::size_t first, bool lasting, bool others)
      : first_(first), lasting_(lasting), others_(others) {}

  // Makes `call`. False if it threw std::bad_alloc, which it may only where memory ran out.
  template <class Call>
  bool survived(Call call) {
    bool done = true;
    begin();
    try {
      call();
    } catch (const std::bad_alloc&) {
      done = false;
    } catch (...) {
      end();
      throw;
    }
    end();
    CHECK(done || ran_out_, "memory did not run out");
    return done;
  }

  bool ran_out() const { return ran_out_; }
  std::size_t first() const { return first_; }

 private:
  void begin();
  void end();

  const std::size_t first_;
  const bool lasting_, others_;
  bool ran_out_ = false;
};

// Calls `work` with every shortage, until memory suffices: of each kind one allocation later each
// time. `step` skips some.
template <class Work>
void each_shortage(Work work, std::size_t step = 1) {
  for (bool others : {false, true})
    for (bool lasting : {false, true})
      for (std::size_t first = 0;; first += step) {
        CHECK(first < 5000, "memory runs out again and again");
        Shortage shortage(first, lasting, others);
        work(shortage);
        if (!shortage.ran_out()) break;
      }
}

}  // namespace infinity::tests
