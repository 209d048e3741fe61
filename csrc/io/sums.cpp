#include "io/sums.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/check.h"

namespace infinity {
namespace {

std::shared_ptr<std::byte> aligned_memory(std::size_t nbytes) {
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kBlockNbytes, nbytes));
  if (memory == nullptr) throw std::bad_alloc();
  return {memory, std::free};
}

void move(Op op, const Volume::Place& place, const std::shared_ptr<std::byte>& memory,
          IoEngine& engine) {
  engine.submit({{op, place.file, place.offset, {memory.get(), kBlockNbytes}, memory}})->wait();
}

// A work queue without threads lets the engine's own do the work.
void refuse_own_thread(const IoEngine& engine) {
  if (engine.completes_here())
    throw StorageError(EAGAIN, "",
                       "the system refuses a thread that verifies what a disk brings (a limit on "
                       "processes: `ulimit -u`, or the container's pids)");
}

}  // namespace

SumTable::SumTable(std::shared_ptr<SumCache> cache, std::shared_ptr<const Volume> volume,
                   std::uint64_t offset, std::size_t nbytes)
    : cache_(std::move(cache)),
      volume_(std::move(volume)),
      offset_(offset),
      nbytes_(nbytes),
      pages_(nbytes_of(nbytes) / kBlockNbytes) {}

std::uint32_t SumTable::get(std::size_t block, IoEngine& engine) {
  refuse_own_thread(engine);
  Lock lock(cache_->mutex_);
  return cache_->slot_of(*this, block / kPageSums, engine).sums()[block % kPageSums];
}

void SumTable::set(std::size_t block, std::uint32_t sum, IoEngine& engine) {
  refuse_own_thread(engine);
  Lock lock(cache_->mutex_);
  SumCache::Slot& slot = cache_->slot_of(*this, block / kPageSums, engine);
  slot.sums()[block % kPageSums] = sum;
  slot.changed = true;
}

SumCache::SumCache(std::size_t pages) : slots_(pages) {
  INFINITY_REQUIRE(pages > 0, "a cache of checksums without a page");
  const auto memory = aligned_memory(pages * kBlockNbytes);
  for (std::size_t i = 0; i < pages; ++i)
    slots_[i].memory = {memory, memory.get() + i * kBlockNbytes};
}

// The slot that has the page, which is brought in if none has.
SumCache::Slot& SumCache::slot_of(SumTable& table, std::size_t page, IoEngine& engine) {
  SumTable::Page& found = table.pages_[page];
  if (found.slot < 0) {
    const int index = free_slot(engine);
    Slot& slot = slots_[index];
    if (found.is_fresh) {
      // Computed once: the sums of whole blocks of zeros, and that of what the last one has.
      static const std::vector<std::byte> zeros(kChecksumNbytes);
      static const std::uint32_t whole = crc32c(zeros.data(), kChecksumNbytes);
      std::fill_n(slot.sums(), SumTable::kPageSums, whole);
      const std::size_t rest = table.nbytes_ % kChecksumNbytes;
      const std::size_t last = table.nbytes_ / kChecksumNbytes;
      if (rest != 0 && last / SumTable::kPageSums == page)
        slot.sums()[last % SumTable::kPageSums] = crc32c(zeros.data(), rest);
    } else {
      const Volume::Place place =
          table.volume_->place(table.offset_ + page * kBlockNbytes, kBlockNbytes);
      try {
        move(Op::kRead, place, slot.memory, engine);
      } catch (...) {  // a device that hangs may still write to it
        slot.memory = aligned_memory(kBlockNbytes);
        throw;
      }
      const std::uint32_t read = crc32c(slot.memory.get(), kBlockNbytes);
      if (read != found.digest)
        throw CorruptionError(
            concat("the checksums in ", engine.file(place.file).path, " at offset ", place.offset,
                   " are not those that were written: wrote ", in_hex(found.digest), ", read ",
                   in_hex(read),
                   ". The disk or its file was changed or lost a write; resume from the last "
                   "checkpoint, on another disk if it happens again"));
    }
    slot.table = table.weak_from_this();
    slot.page = page;
    slot.changed = false;
    found.slot = index;
  }
  slots_[found.slot].used = true;
  return slots_[found.slot];
}

// An empty slot. The page that was in it is on disk, if its extent still is.
int SumCache::free_slot(IoEngine& engine) {
  for (;;) {
    Slot& slot = slots_[hand_];
    const int index = static_cast<int>(hand_);
    hand_ = (hand_ + 1) % slots_.size();
    if (const std::shared_ptr<SumTable> table = slot.table.lock()) {
      if (std::exchange(slot.used, false)) continue;
      SumTable::Page& page = table->pages_[slot.page];
      if (slot.changed) {
        move(Op::kWrite,
             table->volume_->place(table->offset_ + slot.page * kBlockNbytes, kBlockNbytes),
             slot.memory, engine);
        page.digest = crc32c(slot.memory.get(), kBlockNbytes);
        page.is_fresh = false;
      }
      page.slot = SumTable::kAway;
      slot.table.reset();
    }
    return index;
  }
}

}  // namespace infinity
