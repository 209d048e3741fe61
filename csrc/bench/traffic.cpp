// The ceiling of the optimizer kernels: a loop that only moves the bytes a step moves.
#include "bench/traffic.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "base/thread_pool.h"

// ThreadSanitizer cannot run the resolvers that choose among clones.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define INFINITY_FOR_EVERY_UNIT __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define INFINITY_FOR_EVERY_UNIT
#endif

namespace infinity {
namespace {

// bytes; one line of an array of bytes has 64 elements
constexpr std::size_t kLine = 64;

// elements of one stream before the next has its turn: arrays begin at multiples of a large page,
// and a load that follows a store of the same low bits of an address waits for it
constexpr std::size_t kRun = 1024;

using Line = std::uint8_t __attribute__((vector_size(kLine)));

// so that bytes are written back unchanged, without the compiler knowing
volatile std::uint8_t unknown_zero = 0;

INFINITY_FOR_EVERY_UNIT
void move_lines(const Stream* streams, std::size_t stream_count, std::size_t begin,
                std::size_t end) {
  const Line zero = Line{} + unknown_zero;
  for (std::size_t i = begin; i < end; i += kRun)
    for (std::size_t s = 0; s < stream_count; ++s) {
      const Stream& stream = streams[s];
      std::byte* at = stream.data + i * stream.element_nbytes;
      const std::byte* last = stream.data + std::min(i + kRun, end) * stream.element_nbytes;
      for (; at < last; at += kLine) {
        Line value = zero;
        if (stream.read) {
          std::memcpy(&value, at, kLine);
          value ^= zero;
        }
        if (stream.written)
          std::memcpy(at, &value, kLine);
        else
          asm volatile("" : "+m"(value));  // read, and nothing else
      }
    }
}

}  // namespace

void move_streams(const std::vector<Stream>& streams, std::size_t count, int thread_count) {
  INFINITY_REQUIRE(count % kLine == 0, "streams of ", count, " elements: must be a multiple of ",
                   kLine);
  ThreadPool pool(thread_count);
  pool.for_range(0, count, 4096, [&](std::size_t begin, std::size_t end) {
    move_lines(streams.data(), streams.size(), begin, end);
  });
}

}  // namespace infinity
