// SumTable: the checksums of one extent, at home on disk behind its bytes. SumCache: the memory in
// which a few of them are at a time.
//
//   sum      the CRC-32C of one checksum block
//   page     kBlockNbytes of sums: those of kPageSums blocks
//   use      some sums of one page that are to be read or set. It waits until the page is there
//   slot     memory for one page. The page that was not used for about the longest time gives way,
//            and is written first if it was changed. A slot that is moved serves no use
//   share    the slots for the pages of one file. Files have as many each, and at least one, so
//            that a disk that hangs keeps no slot from the others
//   digest   the CRC-32C of a page as it was sent to disk. It stays in memory: a page that was
//            lost, stale, torn or flipped does not count, and neither do the blocks that it vouches
//            for
//   fresh    a page that was never sent: its sums are those of zeros, and nothing is read
//   lost     a page whose write failed: every use of it fails with that error
//
// So an extent takes 8 bytes of memory for each 64 MiB, beside the slots, which all share.
//
// Thread safety: every member function may be called from any thread, and none blocks on a
// transfer. `SumCache::mutex_` guards the slots, the uses that wait and the pages of all tables.
// Lock order: it is held while no other is taken. See io/engine.h for the rest.
// Ownership: a table shares its cache and its volume; the cache knows its tables weakly, and the
// uses that wait keep theirs. All tables of a cache are moved by one engine, which outlives every
// call. Their space must not be given to others before the cache is gone.
#pragma once

#include <cstdint>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "base/crc32c.h"
#include "base/span.h"
#include "base/thread_safety.h"
#include "io/engine.h"
#include "io/volume.h"

namespace infinity {

class SumCache;

using Sums = std::shared_ptr<std::vector<std::uint32_t>>;

// The sum of `nbytes` zeros, at most kChecksumNbytes.
std::uint32_t sum_of_zeros(std::size_t nbytes);

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

  // Reads the sums of the blocks from `first` on into `sums`, as many as it has, or sets them. The
  // ticket has a part for each page, which is over once that is in memory. It fails with
  // StorageError, and with CorruptionError for a page that is not the one that was written.
  TicketPtr move(Op op, std::size_t first, const Sums& sums, IoEngine& engine);

 private:
  friend class SumCache;
  static constexpr int kAway = -1, kLost = -2;
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
  std::exception_ptr lost_;  // why pages are lost; by the same
};

class SumCache : public std::enable_shared_from_this<SumCache> {
 public:
  explicit SumCache(std::size_t pages);

 private:
  friend class SumTable;
  struct Slot {
    std::shared_ptr<std::byte> memory;  // null after a failed move, until its next use
    std::weak_ptr<SumTable> table;
    std::size_t page = 0;
    bool used = false, changed = false, moving = false;
    std::uint32_t* sums() const { return reinterpret_cast<std::uint32_t*>(memory.get()); }
  };
  struct Share {
    std::vector<Slot> slots;
    std::size_t hand = 0;
    int leaving = 0;  // slots whose page is being written
    int wanting = 0;  // uses of this round that found no slot
  };
  struct Use {
    Op op;
    std::shared_ptr<SumTable> table;
    std::size_t page, first, count;  // first: of its sums in the page
    Sums sums;
    std::size_t at;  // in `sums`
    Volume::Place place;  // of the page
    TicketPtr ticket;
    std::exception_ptr error = nullptr;
  };
  struct Move {
    Op op;
    Volume::Place place;
    int slot;
    std::shared_ptr<std::byte> memory;
  };

  void add(std::list<Use> uses, IoEngine& engine) INFINITY_EXCLUDES(mutex_);
  void serve(IoEngine& engine) noexcept INFINITY_EXCLUDES(mutex_);
  void begin(const Move& move, IoEngine& engine) noexcept INFINITY_EXCLUDES(mutex_);
  void end(const Move& move, std::exception_ptr error, const IoEngine& engine) noexcept
      INFINITY_EXCLUDES(mutex_);
  bool try_use(Use& use, std::vector<Move>& moves) INFINITY_REQUIRES(mutex_);
  bool bring(const Use& use, std::vector<Move>& moves) INFINITY_REQUIRES(mutex_);
  int free_slot(Share& share, std::vector<Move>& moves) INFINITY_REQUIRES(mutex_);

  const std::size_t pages_;
  Mutex mutex_;
  std::map<int, Share> shares_ INFINITY_GUARDED_BY(mutex_);  // by file
  std::list<Use> waiting_ INFINITY_GUARDED_BY(mutex_);
  bool serving_ INFINITY_GUARDED_BY(mutex_) = false;  // a thread looks through the uses
  bool again_ INFINITY_GUARDED_BY(mutex_) = false;  // there was more since it looked
};

}  // namespace infinity
