// Errors of the native core, and the checks that stay on in release builds.
//
// Two kinds of wrong. The world's (disk, kernel, a caller's argument) throws one of the typed
// errors below, which the bindings turn into their namesakes in `infinity.errors`. Ours fails
// INFINITY_CHECK.
#pragma once

#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace infinity {

// The disk or the kernel refused: carries errno and the path.
class StorageError : public std::runtime_error {
 public:
  StorageError(int error_number, std::string path, const std::string& what)
      : std::runtime_error(what + ": " + std::strerror(error_number)),
        error_number(error_number),
        path(std::move(path)) {}

  int error_number;
  std::string path;
};

// Bytes came back that are not the bytes that were written.
class CorruptionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A caller's argument is unusable; nothing was changed.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A broken invariant of the engine itself.
class CheckFailure : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace infinity

// The message is built only when the check fails.
#define INFINITY_CHECK(condition, ...)                                                      \
  do {                                                                                      \
    if (__builtin_expect(!(condition), 0)) {                                                \
      throw ::infinity::CheckFailure(::infinity::concat(                                    \
          "check failed: " #condition " at ", __FILE__, ":", __LINE__, ": ", __VA_ARGS__)); \
    }                                                                                       \
  } while (0)

#define INFINITY_REQUIRE(condition, ...)                             \
  do {                                                               \
    if (__builtin_expect(!(condition), 0)) {                         \
      throw ::infinity::UsageError(::infinity::concat(__VA_ARGS__)); \
    }                                                                \
  } while (0)
