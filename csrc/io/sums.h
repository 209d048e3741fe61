// SumTable: the checksums of one extent, at home on disk behind its bytes. SumCache: the memory in
// which a few of them are at a time.
//
//   sum      the CRC-32C of one checksum block
//   page     kBlockNbytes of sums: those of kPageSums blocks
//   slot     memory for one page. The page that was not used for about the longest time gives way,
//            and is written if it was changed
//   digest   the CRC-32C of a page as it was sent to disk. It stays in memory: a page that was
//   lost,
//            stale, torn or flipped does not count, and neither do the blocks that it vouches for
//   fresh    a page that was never sent: its sums are those of zeros, and nothing is read
//
// So an extent takes 8 bytes of memory for each 64 MiB, beside the slots, which all share.
//
// Thread safety: every member function may be called from any thread but that on which the engine
// completes transfers: it would wait for itself, and gets a StorageError. `SumCache::mutex_` guards
// the slots and the pages of all tables. It is held while a page is moved: who needs a sum waits.
// Lock order: SumCache -> Ticket. See io/engine.h for the rest.
// Ownership: a table shares its cache and its volume; the cache knows its tables weakly. All tables
// of a cache are moved by one engine, which outlives every call. Their space must not be given to
// others before the cache is gone.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/crc32c.h"
#include "base/span.h"
#include "base/thread_safety.h"
#include "io/engine.h"
#include "io/volume.h"

namespace infinity {

class SumCache;

class SumTable : public std::enable_shared_from_this<SumTable> {
 public:
  static constexpr std::size_t kPageSums = kBlockNbytes / sizeof(std::uint32_t);

  // The bytes on disk of the table of an extent of `nbytes`.
  static constexpr std::size_t nbytes_of(std::size_t nbytes) {
    return (checksum_count(nbytes) + kPageSums - 1) / kPageSums * kBlockNbytes;
  }

  // Of an extent of `nbytes`, all of zeros. `offset`: of the table in the volume.
  SumTable(std::shared_ptr<SumCache> cache, std::shared_ptr<const Volume> volume,
           std::uint64_t offset, std::size_t nbytes);

  // Block on moving a page if theirs is not in memory. Throw StorageError, and CorruptionError for
  // a page that is not the one that was written.
  std::uint32_t get(std::size_t block, IoEngine& engine);
  void set(std::size_t block, std::uint32_t sum, IoEngine& engine);

 private:
  friend class SumCache;
  static constexpr int kAway = -1;
  struct Page {
    std::uint32_t digest = 0;
    std::int32_t slot : 31;
    bool is_fresh : 1;
    Page() : slot(kAway), is_fresh(true) {}
  };
  static_assert(sizeof(Page) == 8);

  const std::shared_ptr<SumCache> cache_;
  const std::shared_ptr<const Volume> volume_;
  const std::uint64_t offset_;
  const std::size_t nbytes_;
  std::vector<Page> pages_;  // guarded by the cache's mutex
};

class SumCache {
 public:
  explicit SumCache(std::size_t pages);

 private:
  friend class SumTable;
  struct Slot {
    std::shared_ptr<std::byte> memory;
    std::weak_ptr<SumTable> table;
    std::size_t page = 0;
    bool used = false, changed = false;
    std::uint32_t* sums() const { return reinterpret_cast<std::uint32_t*>(memory.get()); }
  };

  Slot& slot_of(SumTable& table, std::size_t page, IoEngine& engine) INFINITY_REQUIRES(mutex_);
  int free_slot(IoEngine& engine) INFINITY_REQUIRES(mutex_);

  Mutex mutex_;
  std::vector<Slot> slots_ INFINITY_GUARDED_BY(mutex_);
  std::size_t hand_ INFINITY_GUARDED_BY(mutex_) = 0;
};

}  // namespace infinity
