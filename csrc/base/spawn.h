// Threads that the system may refuse: a container's pids limit, `ulimit -u`.
#pragma once

#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace infinity {

// Starts a thread and appends it. False, with nothing appended, when the system has no thread to
// give.
template <class Work>
bool try_spawn(std::vector<std::thread>& threads, Work&& work) {
  threads.reserve(threads.size() + 1);  // a thread that has no place would end the process
  try {
    threads.emplace_back(std::forward<Work>(work));
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace infinity
