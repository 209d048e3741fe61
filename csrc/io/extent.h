// Extent: the home of one flat array, in memory or on disk, with a checksum per block and a
// version.
//
//   volume      what an extent on disk is a range of: one file, or several in stripes
//   version     the step that wrote the bytes; extents of one array may have different ones
//   checksums   of extents on disk: one CRC-32C per kChecksumNbytes, so that the next read finds a
//               lost, stale, torn or flipped block. The engine's work threads compute them, before
//               a write starts and after a read has arrived. The ticket ends when they have been
//               recorded or compared. Those of a file that other software wrote are unknown: the
//               first read records them, as a write does
//   table       checksums at home on disk behind the extent's bytes (io/sums.h); else in memory.
//               They are read beside the bytes
//   under way   writes that have not finished, or have failed. A transfer that overlaps one starts
//               after it, because a disk may reorder two transfers of one place. A read after a
//               failed one fails too
//
// Thread safety: copies of an extent share their books, and count as one extent here. Const
// functions may be called from any thread. `write`, `remember` and `set_version` of overlapping
// bytes come from one thread at a time. `Books::mutex` guards the writes under way; the checksums
// of a block belong to the transfer that is under way there, and the version is atomic. Lock order:
// Books::mutex -> Ticket. See io/engine.h for the rest. Ownership: an extent shares the memory, the
// volume and the books with its copies and its transfers. The engine of a transfer has to outlive
// it.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "base/span.h"
#include "base/thread_safety.h"
#include "io/engine.h"
#include "io/sums.h"
#include "io/volume.h"

namespace infinity {

class Extent {
 public:
  // `owner` keeps the memory valid; the extent and its copies hold it.
  static Extent in_memory(Span span, std::shared_ptr<void> owner = nullptr) {
    Extent extent;
    extent.memory_ = span;
    extent.nbytes_ = span.nbytes;
    extent.owner_ = std::move(owner);
    return extent;
  }
  // An extent on disk starts as zeros, which is what reserved space reads as.
  static Extent in_file(int file, std::uint64_t offset, std::size_t nbytes) {
    return in_volume(Volume::of(file), offset, nbytes);
  }
  // Bytes that other software wrote: the first read records their checksums.
  static Extent unknown(int file, std::uint64_t offset, std::size_t nbytes);
  // With `sums` it has a table, of SumTable::nbytes_of(nbytes) behind its bytes.
  static Extent in_volume(std::shared_ptr<const Volume> volume, std::uint64_t offset,
                          std::size_t nbytes, const std::shared_ptr<SumCache>& sums = nullptr);

  // A range of an extent in memory, which shares the owner.
  Extent part(std::size_t at, std::size_t nbytes) const {
    return in_memory({memory_.data + at, nbytes}, owner_);
  }

  bool is_file() const { return volume_ != nullptr; }
  std::size_t nbytes() const { return nbytes_; }
  std::uint64_t offset() const { return offset_; }
  std::byte* memory() const { return memory_.data; }

  // The requests that move `span` to or from byte `at`: one for each stripe.
  std::vector<Request> requests(Op op, std::size_t at, Span span,
                                const std::shared_ptr<void>& memory = nullptr) const;

  // Reads or writes `span` after the overlapping writes under way, and `after`, have finished
  // without error. Unless `checksum` is false, a read fails with CorruptionError if the bytes are
  // not those last written, and a write records their checksums: its bytes have to be final at the
  // call.
  TicketPtr read(IoEngine& engine, std::size_t at, Span span, const TicketPtr& after = nullptr,
                 const std::shared_ptr<void>& memory = nullptr, bool checksum = true) const;
  TicketPtr write(IoEngine& engine, std::size_t at, Span span,
                  const std::shared_ptr<void>& memory = nullptr, bool checksum = true);

  // The writes under way, as one ticket; null if there are none.
  TicketPtr writes_under_way() const { return joined(writes_over(0, nbytes_)); }

  // The writes under way that overlap these bytes, and `after` if it is not null, as one ticket;
  // null if there are none.
  TicketPtr settled(std::size_t at, std::size_t nbytes, const TicketPtr& after) const;

  // False if nothing may have been written to one of these blocks since its space was reserved: it
  // is `expected` to be zeros.
  bool written(std::size_t at, std::size_t nbytes, const Sums& expected) const;
  // The checksum of the first `nbytes` (whole blocks, or all), combined from those of the blocks,
  // which are in memory.
  std::uint32_t checksum(std::size_t nbytes) const;

  // The checksums that the blocks of these bytes have to have, whole once the ticket (null: now)
  // has finished. `after` comes first.
  struct Expected {
    Sums sums;
    TicketPtr ticket;
  };
  Expected expected(std::size_t at, std::size_t nbytes, IoEngine& engine,
                    const TicketPtr& after = nullptr) const;
  // Records the checksums of blocks that were written at `at`, once the ticket (null: now) has
  // finished.
  TicketPtr record(std::size_t at, const Sums& sums, IoEngine& engine) const;
  // Throws CorruptionError if the checksums `found` of blocks at `at` are not those of `expected`,
  // which begin at byte `from`.
  void compare(std::size_t at, const std::vector<std::uint32_t>& found, const Sums& expected,
               std::size_t from, const IoEngine& engine) const;

  // Records the checksums of bytes about to be written at `at` (a multiple of kChecksumNbytes).
  // Blocks.
  void remember(std::size_t at, Span span, IoEngine& engine) const;
  // Throws CorruptionError if bytes read at `at` are not those last written there. Blocks.
  void verify(std::size_t at, Span span, IoEngine& engine) const;

  std::uint64_t version() const { return books_->version; }
  void set_version(std::uint64_t version) { books_->version = version; }

 private:
  struct Write {
    std::size_t at, nbytes;
    TicketPtr ticket;
  };
  struct Books {  // on the heap: transfers under way hold them
    std::vector<std::uint32_t> checksums;  // empty if there is a table
    std::shared_ptr<SumTable> table;
    std::atomic<std::uint64_t> version{0};
    Mutex mutex;
    std::list<Write> under_way INFINITY_GUARDED_BY(mutex);
  };
  class BlockSums;

  void check(std::size_t at, std::size_t nbytes) const;
  IoEngine::Then recording(std::size_t at, const std::shared_ptr<BlockSums>& sums,
                           IoEngine& engine) const;
  std::string where(const IoEngine& engine, std::size_t at) const;
  bool has_table() const { return books_->table != nullptr; }
  std::vector<TicketPtr> writes_over(std::size_t at, std::size_t nbytes) const;

  Span memory_;
  std::shared_ptr<void> owner_;
  std::shared_ptr<const Volume> volume_;
  bool known_ = true;
  std::uint64_t offset_ = 0;  // in the volume
  std::size_t nbytes_ = 0;
  std::shared_ptr<Books> books_ = std::make_shared<Books>();
};

}  // namespace infinity
