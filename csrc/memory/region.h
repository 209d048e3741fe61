// Region: page-aligned memory straight from the kernel, given back when the Region dies.
#pragma once

#include <cstddef>

#include "base/span.h"

namespace infinity {

class Driver;

class Region {
 public:
  // `nbytes` is rounded up to whole 4096-byte pages and to nothing more. `huge_pages` asks the kernel to back
  // the 2 MiB-aligned parts with huge pages; `touch_threads` threads fault every page in before this returns.
  Region(std::size_t nbytes, bool huge_pages, int touch_threads);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Registers the memory with CUDA, until the Region dies: GPUs copy from and to it by themselves. Throws UsageError
  // where there is no driver, StorageError where it refuses.
  void pin(int device);
  bool pinned() const { return driver_ != nullptr; }

  // `threads` threads fault every page in before this returns. What is in the memory stays, and so does what somebody
  // writes to it meanwhile.
  void populate(int threads);

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  bool huge_pages() const { return huge_pages_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  bool huge_pages_ = false;
  Driver* driver_ = nullptr;  // that it is registered with
  int device_ = 0;
  int process_ = 0;
};

}  // namespace infinity
