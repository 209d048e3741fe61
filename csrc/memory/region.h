// Region: page-aligned memory straight from the kernel, given back when the Region dies.
//
// It is the process's alone: a forked child (every worker of a data loader is one) gets neither a copy nor the address
// range, and what it drops of ours is not given back there. Pages: has the kernel make a list of regions present, behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#include "base/span.h"

namespace infinity {

class Driver;

constexpr std::size_t kHugeNbytes = 2 * 1024 * 1024;

// A range of a file in memory, from a whole page on.
struct FileRange {
  int file = -1;  // none: memory of this process alone
  std::size_t offset = 0;
  bool writable = true;
};

class Region {
 public:
  // `nbytes` is rounded up to whole 4096-byte pages and to nothing more. `huge_pages` asks the kernel to back
  // the 2 MiB-aligned parts with huge pages; `touch_threads` threads fault every page in before this returns.
  // `range`: whose bytes these are; the file may be closed once this returns.
  Region(std::size_t nbytes, bool huge_pages, int touch_threads, FileRange range = {});
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Registers the memory with CUDA, until the Region dies: GPUs copy from and to it by themselves. Throws UsageError
  // where there is no driver, StorageError where it refuses.
  void pin(int device);
  bool pinned() const { return driver_ != nullptr; }

  // `threads` threads fault every page in before this returns. What is in the memory stays, and so does what somebody
  // writes to it meanwhile. Ends early once `stopped` is set. Throws StorageError where the kernel has no shared memory left.
  void populate(int threads, const std::atomic<bool>* stopped = nullptr);

  // Gives the pages back to the kernel; the addresses stay, and read as zeros until they are written to. What was pinned is not any
  // more. Not for memory that an I/O engine has registered: it would go on with the old pages. Throws StorageError.
  void discard();

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  bool huge_pages() const { return huge_pages_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::atomic<bool> huge_pages_{false};
  std::atomic<bool> collapses_{false};  // shared pages are made huge as they are made present
  bool shared_ = false;
  Driver* driver_ = nullptr;  // that it is registered with
  int device_ = 0;
  const int process_ = getpid();
};

// A thread that makes every page of some regions present. No Python runs in it: it may outlive the interpreter's will.
class Pages {
 public:
  // Where the system refuses a thread, all is done when this returns.
  Pages(std::vector<std::shared_ptr<Region>> regions, int threads);
  ~Pages() { stop(); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  bool is_ours() const { return process_ == getpid(); }
  bool done() const { return done_; }
  // Returns when every page is there. Throws what went wrong.
  void wait();
  // Returns when it does nothing any more.
  void stop();

 private:
  void run(int threads);

  const int process_ = getpid();
  const std::vector<std::shared_ptr<Region>> regions_;
  std::atomic<bool> stopped_{false}, done_{false};
  std::exception_ptr error_;
  std::mutex joining_;
  std::vector<std::thread> thread_;  // one, or none
};

// Gives the kernel what was freed: the C library keeps it otherwise, in pieces too small for the next buffer of that size,
// and a group's limit counts it.
void trim_heap();

// Has the C library map every buffer of at least `nbytes` by itself, from now on, and unmap it when it is freed: a heap with holes is
// address space, which trim_heap() does not give back and ulimits count.
void map_large_buffers(std::size_t nbytes);

}  // namespace infinity
