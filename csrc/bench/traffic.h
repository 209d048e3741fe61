// The ceiling of the optimizer kernels: a loop that only moves the bytes a step moves, in the
// pattern it moves them.
#pragma once

#include <cstddef>
#include <vector>

namespace infinity {

struct Stream {
  std::byte* data;
  std::size_t element_nbytes;
  bool read, written;  // both: written back as it was; written only: zeros
};

// Visits `count` elements of all streams side by side, on `thread_count` threads.
void move_streams(const std::vector<Stream>& streams, std::size_t count, int thread_count);

}  // namespace infinity
