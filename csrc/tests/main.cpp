// core_tests --list names the cases; core_tests NAME runs one: 0 passed, 77 skipped, anything else
// failed.
#include <cstdio>
#include <cstring>
#include <exception>

#include "tests/test.h"

// An exception that two threads hold is freed by the last to let go. libstdc++ counts them with
// atomics that ThreadSanitizer does not see, for the library is not built with it: it takes that
// release for a race with the other thread's what(). Only the release is passed over; everything
// else that touches an exception is still judged.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}

int main(int argc, char** argv) {
  using namespace infinity::tests;
  if (argc == 2 && !std::strcmp(argv[1], "--list")) {
    for (const Case& each : cases()) std::puts(each.name.c_str());
    return 0;
  }
  for (const Case& each : cases()) {
    if (argc != 2 || each.name != argv[1]) continue;
    try {
      each.run();
      return 0;
    } catch (const Skipped& reason) {
      std::puts(reason.what());
      return 77;
    } catch (const std::exception& error) {
      std::puts(error.what());
      return 1;
    }
  }
  std::puts("usage: core_tests --list | core_tests NAME");
  return 2;
}
