#include "memory/region.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>

#include "base/check.h"
#include "base/spawn.h"
#include "base/thread_pool.h"
#include "memory/driver.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // the same, of Linux 6.1
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // of Linux, wherever the headers are older than that
#endif

namespace infinity {
namespace {
constexpr std::size_t kMaxNbytes = std::size_t{1} << 47;  // of a process's address space

// Faults the pages in and changes no byte of them. Returns the error of shared memory that the
// kernel has not: touching it would end the process.
int fault_in(std::byte* data, std::size_t nbytes, bool shared) {
  if (madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (shared && errno != EINVAL) return errno;
  // A kernel before 5.14. An atomic "or" with zero loses no byte that another thread writes at the
  // same time.
  for (std::size_t at = 0; at < nbytes; at += kBlockNbytes)
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data + at), 0, __ATOMIC_RELAXED);
  return 0;
}

// True if huge pages are switched off for the whole machine.
bool are_off() {
  char said[64] = "";
  const int file = open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t nbytes = read(file, said, sizeof said - 1);
  close(file);
  return nbytes > 0 && std::strstr(said, "[never]") != nullptr;
}
}  // namespace

Region::Region(std::size_t nbytes, bool huge_pages, int touch_threads, FileRange range)
    : nbytes_(round_up(nbytes, kBlockNbytes)), shared_(range.file >= 0) {
  INFINITY_REQUIRE(nbytes > 0, "a region needs at least one byte");
  if (nbytes > kMaxNbytes)
    throw StorageError(ENOMEM, "", concat("cannot map ", nbytes, " bytes of host memory"));
  // A huge page needs a 2 MiB-aligned address: over-reserve address space (not memory) and trim
  // both ends.
  const bool aligned = huge_pages && nbytes_ >= kHugeNbytes;
  const std::size_t slack = aligned ? kHugeNbytes : 0;
  const int reserved = shared_ ? PROT_NONE : PROT_READ | PROT_WRITE;
  void* address = mmap(nullptr, nbytes_ + slack, reserved,
                       MAP_PRIVATE | MAP_ANONYMOUS | (shared_ ? MAP_NORESERVE : 0), -1, 0);
  if (address == MAP_FAILED)
    throw StorageError(errno, "", concat("cannot map ", nbytes_, " bytes of host memory"));
  data_ = static_cast<std::byte*>(address);
  if (aligned) {
    auto* start =
        reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::size_t>(data_), kHugeNbytes));
    const std::size_t head = start - data_;
    if (head) munmap(data_, head);
    if (slack - head) munmap(start + nbytes_, slack - head);
    data_ = start;
  }
  if (shared_) {
    const int access = range.writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mmap(data_, nbytes_, access, MAP_SHARED | MAP_FIXED, range.file,
             static_cast<off_t>(range.offset)) == MAP_FAILED) {
      const int refused = errno;
      munmap(data_, nbytes_);
      throw StorageError(refused, "", concat("cannot map ", nbytes_, " bytes of shared memory"));
    }
  }
  if (aligned) huge_pages_ = madvise(data_, nbytes_, MADV_HUGEPAGE) == 0 && !shared_;
  collapses_ = aligned && shared_ && range.writable && !are_off();
  // A fork would copy every page that is registered with a ring or a driver, for a child that has
  // no use for any.
  madvise(data_, nbytes_, MADV_DONTFORK);
  try {
    if (touch_threads > 0) populate(touch_threads);
  } catch (...) {
    munmap(data_, nbytes_);
    throw;
  }
}

void Region::pin(int device) {
  if (driver_) return;
  std::string refusal;
  Driver* driver = Driver::find(&refusal);
  INFINITY_REQUIRE(driver, refusal);
  driver->register_host(data_, nbytes_, device);
  device_ = device;
  driver_ = driver;
}

void Region::discard() {
  if (driver_) driver_->unregister_host(data_, device_);  // which holds the pages
  driver_ = nullptr;
  if (nbytes_ && madvise(data_, nbytes_, shared_ ? MADV_REMOVE : MADV_DONTNEED) != 0)
    throw StorageError(errno, "", concat("cannot give ", nbytes_, " bytes of host memory back"));
}

Region::~Region() {
  if (process_ != getpid()) return;  // what lies at that address in a child is not ours
  if (driver_) driver_->unregister_host(data_, device_);
  if (data_) munmap(data_, nbytes_);
}

void Region::populate(int threads, const std::atomic<bool>* stopped) {
  ThreadPool pool(threads);
  std::atomic<int> refused{0};
  const auto fault_in_range = [&](std::size_t begin, std::size_t end) {
    // Huge page by huge page: each call holds the lock that mapping and unmapping anything in this
    // process needs.
    for (std::size_t at = begin; at < end && !refused && !(stopped && *stopped);
         at += kHugeNbytes) {
      const std::size_t nbytes = std::min(kHugeNbytes, end - at);
      if (const int error = fault_in(data_ + at, nbytes, shared_)) refused = error;
      // For shared memory the kernel ignores MADV_HUGEPAGE by default, but does MADV_COLLAPSE.
      if (!collapses_ || nbytes != kHugeNbytes) continue;
      if (madvise(data_ + at, nbytes, MADV_COLLAPSE) == 0)
        huge_pages_ = true;
      else
        collapses_ = false;
    }
  };
  pool.for_range(0, nbytes_, kHugeNbytes, std::cref(fault_in_range));
  if (refused)
    throw StorageError(refused, "",
                       concat("the system has no ", nbytes_,
                              " bytes left for memory that ranks share; Config(share_homes=False) "
                              "takes none of that"));
}

Pages::Pages(std::vector<std::shared_ptr<Region>> regions, int threads)
    : regions_(std::move(regions)) {
  if (!try_spawn(thread_, [this, threads] { run(threads); })) run(threads);
}

void Pages::run(int threads) {
  try {
    for (const auto& region : regions_) {
      if (stopped_) break;
      region->populate(threads, &stopped_);
    }
  } catch (...) {
    error_ = std::current_exception();
  }
  done_ = true;
}

void Pages::wait() {
  Lock lock(joining_);
  for (std::thread& thread : thread_) thread.join();
  thread_.clear();
  if (error_) std::rethrow_exception(error_);
}

void Pages::stop() {
  stopped_ = true;
  Lock lock(joining_);
  for (std::thread& thread : thread_) thread.join();
  thread_.clear();
}

void map_large_buffers(std::size_t nbytes) {
#ifdef __GLIBC__
  (void)mallopt(M_MMAP_THRESHOLD, static_cast<int>(nbytes));
#else
  (void)nbytes;
#endif
}

void trim_heap() {
#ifdef __GLIBC__
  (void)malloc_trim(0);
#endif
}

}  // namespace infinity
