// Threads that the system may refuse: a container's pids limit, `ulimit -u`.
#pragma once

#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace infinity {

// Starts a thread and appends it. False, with nothing appended, when the system has no thread, or
// no memory for one.
template <class Work>
bool try_spawn(std::vector<std::thread>& threads, Work&& work) {
  try {
    threads.reserve(threads.size() + 1);  // a thread that has no place would end the process
    threads.emplace_back(std::forward<Work>(work));
    return true;
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  return false;
}

}  // namespace infinity
