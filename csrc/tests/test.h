// The frame of these tests: cases by name, and checks that throw. One process runs one case.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"

namespace infinity::tests {

struct Case {
  std::string name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Failed : std::logic_error {
  using std::logic_error::logic_error;
};

// What this machine cannot show, with the reason.
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs `call`, which must throw an Error, and returns what it said.
template <class Error, class Call>
std::string said_by(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  throw Failed("nothing was thrown");
}

}  // namespace infinity::tests

// `TEST(io, name)` is the case "io/name".
#define TEST(group, name)                                                               \
  static void group##_##name();                                                         \
  static const bool group##_##name##_known =                                            \
      (::infinity::tests::cases().push_back({#group "/" #name, group##_##name}), true); \
  static void group##_##name()

#define CHECK(condition, ...)                                                                \
  do {                                                                                       \
    if (!(condition))                                                                        \
      throw ::infinity::tests::Failed(                                                       \
          ::infinity::concat(__FILE__, ":", __LINE__, ": " #condition ". ", ##__VA_ARGS__)); \
  } while (0)
