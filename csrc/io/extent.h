// Extent: the home of one flat array, in memory or on disk, with a checksum per block and a version.
//
//   volume      what an extent on disk is a range of: one file, or several in stripes
//   version     the step that wrote the bytes; several extents of one array may carry different ones later
//   checksums   of extents on disk only, one CRC-32C per kChecksumNbytes, kept in memory: what the disk returns is
//               held against what was sent, so a lost, stale, torn or flipped block is met at the next read. Taken and verified piece by
//               piece by the engine's threads for work, of a write before it sets out and of a read as it arrives. Those of a file that
//               somebody else wrote are not known before it is read: a read takes them then, as a write does
//   under way   writes that are not over yet, or failed. What overlaps one starts when it is over, whoever still has its
//               ticket: the disk may do two transfers of one place in either order. A read behind a failed one fails too
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/span.h"
#include "io/engine.h"
#include "io/volume.h"

namespace infinity {

class Extent {
 public:
  // `owner` keeps the memory for as long as anything refers to the extent.
  static Extent in_memory(Span span, std::shared_ptr<void> owner = nullptr) {
    Extent extent;
    extent.memory_ = span;
    extent.nbytes_ = span.nbytes;
    extent.owner_ = std::move(owner);
    return extent;
  }
  // An extent on disk starts as zeros: what reserved space reads as before its first write.
  static Extent in_file(int file, std::uint64_t offset, std::size_t nbytes) { return in_volume(Volume::of(file), offset, nbytes); }
  // Bytes that somebody else wrote: reading them takes their checksums.
  static Extent unknown(int file, std::uint64_t offset, std::size_t nbytes);
  static Extent in_volume(std::shared_ptr<const Volume> volume, std::uint64_t offset, std::size_t nbytes);

  // Bytes of an extent in memory, which they keep too.
  Extent part(std::size_t at, std::size_t nbytes) const { return in_memory({memory_.data + at, nbytes}, owner_); }

  bool is_file() const { return volume_ != nullptr; }
  std::size_t nbytes() const { return nbytes_; }
  std::uint64_t offset() const { return offset_; }
  std::byte* memory() const { return memory_.data; }

  // What moves `span` to or from byte `at`: one request for each stripe.
  std::vector<Request> requests(Op op, std::size_t at, Span span, const std::shared_ptr<void>& memory = nullptr) const;

  // Reads or writes `span` once the writes under way that overlap it, and `after`, are over without error. Unless `checksum` is false, a
  // read's ticket fails with CorruptionError where the bytes are not those last written there, and a write, whose bytes must be there
  // already, has their checksums remembered, as a read has of an extent whose bytes are unknown.
  TicketPtr read(IoEngine& engine, std::size_t at, Span span, const TicketPtr& after = nullptr,
                 const std::shared_ptr<void>& memory = nullptr, bool checksum = true) const;
  TicketPtr write(IoEngine& engine, std::size_t at, Span span, const std::shared_ptr<void>& memory = nullptr,
                  bool checksum = true);

  // The writes under way, as one ticket; null when there are none.
  TicketPtr writes_under_way() const { return joined(writes_over(0, nbytes_)); }

  // The writes under way that overlap these bytes, and `after` (null: nothing), as one ticket; null when there are none.
  TicketPtr settled(std::size_t at, std::size_t nbytes, const TicketPtr& after) const;

  // Whether something was sent to each of these bytes since the space for them was reserved.
  bool written(std::size_t at, std::size_t nbytes) const;
  // The checksum of the first `nbytes`, whole blocks or all, joined from those of the blocks.
  std::uint32_t checksum(std::size_t nbytes) const;

  // Keeps the checksums of bytes about to be written at `at` (a multiple of kChecksumNbytes).
  void remember(std::size_t at, Span span);
  // Throws CorruptionError when bytes read at `at` are not those last written there.
  void verify(std::size_t at, Span span, const IoEngine& engine) const;
  // The same of checksums that were taken elsewhere: one per kChecksumNbytes.
  void verify_sums(std::size_t at, const std::vector<std::uint32_t>& found, const IoEngine& engine) const;

  std::uint64_t version() const { return books_->version; }
  void set_version(std::uint64_t version) { books_->version = version; }

 private:
  struct Write {
    std::size_t at, nbytes;
    TicketPtr ticket;
  };
  struct Books {  // apart: transfers under way keep them
    std::vector<std::uint32_t> checksums;
    std::atomic<std::uint64_t> version{0};
    std::mutex mutex;
    std::vector<Write> under_way;
    std::vector<bool> sent;  // by checksum block: something was
  };
  class BlockSums;

  void check(std::size_t at, std::size_t nbytes) const;
  std::string where(const IoEngine& engine, std::size_t at) const;
  void hold(std::size_t block, std::uint32_t found, const IoEngine& engine) const;
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
