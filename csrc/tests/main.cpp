// core_tests --list names the cases; core_tests NAME runs one: 0 passed, 77 skipped, anything else failed.
#include <cstdio>
#include <cstring>
#include <exception>

#include "tests/test.h"

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
