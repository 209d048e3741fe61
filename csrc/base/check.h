// Errors of the native core, and the checks that stay on in release builds.
//
// Two kinds of wrong. The world's (disk, kernel, a caller's argument) throws one of the typed
// errors below, which the bindings turn into their namesakes in `infinity.errors`. Ours fails
// INFINITY_CHECK.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
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

// The core uses no streams: theirs are looked up in a table that all copies of the C++ library in a
// process share, and a copy linked into this module crashes where torch has loaded another.
template <class Part>
void append(std::string& text, const Part& part) {
  if constexpr (std::is_same_v<Part, char>) {
    text.push_back(part);
  } else if constexpr (std::is_integral_v<Part>) {
    text.append(std::to_string(part));
  } else if constexpr (std::is_convertible_v<Part, std::string_view>) {
    text.append(std::string_view(part));
  } else {
    char digits[32];
    if constexpr (std::is_floating_point_v<Part>)
      std::snprintf(digits, sizeof digits, "%g", static_cast<double>(part));
    else
      std::snprintf(digits, sizeof digits, "%p", static_cast<const void*>(part));
    text.append(digits);
  }
}

inline std::string in_hex(std::uint32_t value) {
  char digits[12];
  std::snprintf(digits, sizeof digits, "%x", value);
  return digits;
}

// Strings, characters, numbers and addresses, one after the other.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

// Returns the error that `make` returns, to end a ticket with; std::bad_alloc if there is no memory
// for its text. Does not throw.
template <class Make>
std::exception_ptr made_error(Make make) noexcept {
  try {
    return std::make_exception_ptr(make());
  } catch (...) {
    return std::current_exception();
  }
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
