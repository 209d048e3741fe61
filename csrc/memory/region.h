// Region: page-aligned memory straight from the kernel, given back when the Region dies. Pages: a
// thread that makes every page of a list of regions present.
//
// A region belongs to one process. A forked child (every worker of a data loader is one) gets
// neither a copy nor the address range, and giving a region back in the child does nothing.
//
// Thread safety: the accessors may be called from any thread. `pin`, `discard` and the destructor
// need the region for themselves. `populate` may run beside reads and writes of the memory, not
// beside those three.
// `Pages::done`, `wait` and `stop` may be called from any thread.
// Ownership: a Region owns its mapping, and its registration with the driver. Pages keeps its
// regions.
// `Pages::joining_` guards the thread, and is held while it is joined. There is no lock order.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include <unistd.h>

#include "base/span.h"
#include "base/thread_safety.h"

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
  // `nbytes` is rounded up to whole 4096-byte pages. `huge_pages` asks the kernel to back the 2
  // MiB-aligned parts with huge pages. `touch_threads` threads fault every page in before this
  // returns.
  // `range`: the file to map; its descriptor may be closed once this returns.
  Region(std::size_t nbytes, bool huge_pages, int touch_threads, FileRange range = {});
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Registers the memory with CUDA until the Region dies, so that GPUs copy from and to it. Throws
  // UsageError if there is no driver, StorageError if it refuses.
  void pin(int device);
  bool pinned() const { return driver_ != nullptr; }

  // Faults every page in, in `threads` threads. The content stays, also what other threads write
  // meanwhile. Returns early once `stopped` is set. Throws StorageError if the kernel has no shared
  // memory left.
  void populate(int threads, const std::atomic<bool>* stopped = nullptr);

  // Gives the pages back to the kernel. The addresses stay valid and read as zeros; the memory is
  // no longer pinned. Not for memory that is registered with an I/O engine, which would use the old
  // pages. Throws StorageError.
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

// The thread runs no Python, so it may still run while the interpreter shuts down.
class Pages {
 public:
  // If the system refuses a thread, the caller's does the work before this returns.
  Pages(std::vector<std::shared_ptr<Region>> regions, int threads);
  ~Pages() { stop(); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  bool is_ours() const { return process_ == getpid(); }
  bool done() const { return done_; }
  // Blocks until every page is present. Throws the thread's error.
  void wait();
  // Stops early, and blocks until the thread has ended.
  void stop();

 private:
  void run(int threads);

  const int process_ = getpid();
  const std::vector<std::shared_ptr<Region>> regions_;
  std::atomic<bool> stopped_{false}, done_{false};
  std::exception_ptr error_;  // set by the thread, read after it was joined
  Mutex joining_;
  std::vector<std::thread> thread_ INFINITY_GUARDED_BY(joining_);  // one, or none
};

// Gives freed heap memory back to the kernel. Otherwise the C library keeps it, in pieces too small
// for the next large buffer, and a control group's limit counts it. Thread-safe.
void trim_heap();

// Has the C library map every buffer of at least `nbytes` on its own, and unmap it when it is
// freed. A heap with holes keeps address space, which trim_heap() does not give back and ulimits
// count.
void map_large_buffers(std::size_t nbytes);

}  // namespace infinity
