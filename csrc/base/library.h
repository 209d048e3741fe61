// Library: what a shared object that may be missing offers.
#pragma once

#include <dlfcn.h>

#include <string>
#include <type_traits>

namespace infinity {

// Looks up functions of a shared object, each into a pointer of its type.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <class Function>
  void look_up(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (!function) missing_ = name;
  }

  // The last one that was not there; empty where all were.
  const std::string& missing() const { return missing_; }

 private:
  void* const library_;
  std::string missing_;
};

}  // namespace infinity
