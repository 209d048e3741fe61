#include "memory/region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/check.h"
#include "base/thread_pool.h"
#include "memory/driver.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // of Linux, wherever the headers are older than that
#endif

namespace infinity {
namespace {
constexpr std::size_t kHugeNbytes = 2 * 1024 * 1024;
constexpr std::size_t kMaxNbytes = std::size_t{1} << 47;  // of a process's address space

// Faults the pages in and changes no byte of them.
void fault_in(std::byte* data, std::size_t nbytes) {
  if (madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) return;
  // A kernel before 5.14. An atomic "or" with nothing loses no byte that somebody writes at the same time.
  for (std::size_t at = 0; at < nbytes; at += kBlockNbytes)
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data + at), 0, __ATOMIC_RELAXED);
}
}

Region::Region(std::size_t nbytes, bool huge_pages, int touch_threads) : nbytes_(round_up(nbytes, kBlockNbytes)) {
  INFINITY_REQUIRE(nbytes > 0, "a region needs at least one byte");
  if (nbytes > kMaxNbytes) throw StorageError(ENOMEM, "", concat("cannot map ", nbytes, " bytes of host memory"));
  // A huge page needs a 2 MiB-aligned address: over-reserve address space (not memory) and trim both ends.
  const bool aligned = huge_pages && nbytes_ >= kHugeNbytes;
  const std::size_t slack = aligned ? kHugeNbytes : 0;
  void* address = mmap(nullptr, nbytes_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw StorageError(errno, "", concat("cannot map ", nbytes_, " bytes of host memory"));
  data_ = static_cast<std::byte*>(address);
  if (aligned) {
    auto* start = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::size_t>(data_), kHugeNbytes));
    const std::size_t head = start - data_;
    if (head) munmap(data_, head);
    if (slack - head) munmap(start + nbytes_, slack - head);
    data_ = start;
    huge_pages_ = madvise(data_, nbytes_, MADV_HUGEPAGE) == 0;
  }
  if (touch_threads > 0) populate(touch_threads);
}

void Region::pin(int device) {
  if (driver_) return;
  std::string refusal;
  Driver* driver = Driver::find(&refusal);
  INFINITY_REQUIRE(driver, refusal);
  driver->register_host(data_, nbytes_, device);
  // A fork would copy every registered page for the child, which has no use for any: a data loader's workers, say.
  madvise(data_, nbytes_, MADV_DONTFORK);
  process_ = getpid();
  device_ = device;
  driver_ = driver;
}

Region::~Region() {
  if (driver_ && process_ == getpid()) driver_->unregister_host(data_, device_);
  if (data_) munmap(data_, nbytes_);
}

void Region::populate(int threads) {
  ThreadPool pool(threads);
  pool.for_range(0, nbytes_, kHugeNbytes, [this](std::size_t begin, std::size_t end) {
    // Huge page by huge page: each call holds the lock that mapping and unmapping anything in this process needs.
    for (std::size_t at = begin; at < end; at += kHugeNbytes)
      fault_in(data_ + at, std::min(kHugeNbytes, end - at));
  });
}

}  // namespace infinity
