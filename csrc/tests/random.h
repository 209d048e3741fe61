// Random: seeded numbers, the same on every machine. Says its seed, so that a failure can be
// repeated.
#pragma once

#include <cstdint>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "base/span.h"

namespace infinity::tests {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  }

  std::uint64_t word() { return engine_(); }
  std::size_t below(std::size_t bound) { return engine_() % bound; }

  void fill(Span span) {
    for (std::size_t i = 0; i < span.nbytes; ++i)
      span.data[i] = static_cast<std::byte>(engine_() >> 56);
  }

  std::vector<std::byte> bytes(std::size_t count) {
    std::vector<std::byte> found(count);
    fill({found.data(), count});
    return found;
  }

  template <class Value>
  void shuffle(std::vector<Value>& values) {
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace infinity::tests
