#include "io/sums.h"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "base/check.h"

namespace infinity {
namespace {

std::shared_ptr<std::byte> aligned_memory(std::size_t nbytes) {
  constexpr std::align_val_t kAligned{kBlockNbytes};
  return {static_cast<std::byte*>(operator new(nbytes, kAligned)),
          [](std::byte* memory) { operator delete(memory, kAligned); }};
}

bool is_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

std::uint32_t sum_of_zeros(std::size_t nbytes) {
  static const std::array<std::byte, kChecksumNbytes> zeros{};
  static const std::uint32_t whole = crc32c(zeros.data(), kChecksumNbytes);
  return nbytes == kChecksumNbytes ? whole : crc32c(zeros.data(), nbytes);
}

SumTable::SumTable(std::shared_ptr<SumCache> cache, std::shared_ptr<const Volume> volume,
                   std::uint64_t offset, std::size_t nbytes)
    : cache_(std::move(cache)),
      volume_(std::move(volume)),
      offset_(offset),
      nbytes_(nbytes),
      pages_(nbytes_of(nbytes) / kBlockNbytes) {}

TicketPtr SumTable::move(Op op, std::size_t first, const Sums& sums, IoEngine& engine) {
  std::list<SumCache::Use> uses;
  const std::size_t end = first + sums->size();
  for (std::size_t at = first; at < end;) {
    const std::size_t page = at / kPageSums, next = std::min(end, (page + 1) * kPageSums);
    uses.push_back({op, shared_from_this(), page, at % kPageSums, next - at, sums, at - first,
                    volume_->place(offset_ + page * kBlockNbytes, kBlockNbytes), nullptr});
    at = next;
  }
  const auto ticket = std::make_shared<Ticket>(uses.size());
  for (SumCache::Use& use : uses) use.ticket = ticket;
  cache_->add(std::move(uses), engine);
  return ticket;
}

SumCache::SumCache(std::size_t pages) : pages_(pages) {
  INFINITY_REQUIRE(pages > 0, "a cache of checksums without a page");
}

void SumCache::add(std::list<Use> uses, IoEngine& engine) {
  {
    Lock lock(mutex_);
    for (const Use& use : uses) {
      Share& share = shares_[use.place.file];
      if (!share.slots.empty()) continue;
      const std::size_t count =
          std::max<std::size_t>(1, pages_ / use.table->volume_->files().size());
      const auto memory = aligned_memory(count * kBlockNbytes);
      share.slots.resize(count);  // nothing can fail from here on
      for (std::size_t i = 0; i < count; ++i)
        share.slots[i].memory = {memory, memory.get() + i * kBlockNbytes};
    }
    waiting_.splice(waiting_.end(), uses);
  }
  serve(engine);
}

// Ends the uses whose page is there, and moves pages for the others. One thread at a time does: a
// move that fails at once comes back here. A use that there is no memory for fails alone.
void SumCache::serve(IoEngine& engine) noexcept {
  Lock lock(mutex_);
  again_ = true;
  if (serving_) return;
  serving_ = true;
  const auto kept = shared_from_this();  // a use may be the last that has it
  while (std::exchange(again_, false)) {
    std::list<Use> over;
    std::vector<Move> moves;
    for (auto& [file, share] : shares_) share.wanting = 0;
    for (auto use = waiting_.begin(); use != waiting_.end();) {
      const auto next = std::next(use);
      bool is_over = true;
      try {
        is_over = try_use(*use, moves);
      } catch (...) {
        use->error = std::current_exception();
      }
      if (is_over) over.splice(over.end(), waiting_, use);
      use = next;
    }
    lock.unlock();
    for (const Move& move : moves) begin(move, engine);
    for (const Use& use : over) use.ticket->part_done(use.error);
    over.clear();
    lock.lock();
  }
  serving_ = false;
}

// Starts a move. Its end may come at once.
void SumCache::begin(const Move& move, IoEngine& engine) noexcept {
  const auto over = [kept = shared_from_this(), move, &engine](std::exception_ptr error) {
    kept->end(move, std::move(error), engine);
    kept->serve(engine);
  };
  TicketPtr ticket;
  Ticket::Callbacks follow;
  try {
    Request request{move.op,
                    move.place.file,
                    move.place.offset,
                    {move.memory.get(), kBlockNbytes},
                    move.memory};
    request.is_bounded = true;  // by the slots
    follow.push_back(over);
    ticket = engine.submit({request});
  } catch (...) {
    return over(std::current_exception());
  }
  ticket->hurry();
  ticket->on_done(std::move(follow));
}

// The slot of a move serves uses again. An error is that of the page, not of what wanted the slot.
// But a page that was not written for want of memory is as good as before, and what wanted its slot
// fails.
void SumCache::end(const Move& move, std::exception_ptr error, const IoEngine& engine) noexcept {
  std::shared_ptr<SumTable> table;  // destroyed without the mutex
  std::shared_ptr<std::byte> given_up;
  std::list<Use> over;
  const auto end_uses = [&](const auto& is_meant) INFINITY_REQUIRES(mutex_) {
    for (auto use = waiting_.begin(); use != waiting_.end();) {
      const auto next = std::next(use);
      if (is_meant(*use)) over.splice(over.end(), waiting_, use);
      use = next;
    }
  };
  {
    Lock lock(mutex_);
    Share& share = shares_[move.place.file];
    Slot& slot = share.slots[move.slot];
    slot.moving = false;
    share.leaving -= move.op == Op::kWrite;
    table = slot.table.lock();
    const bool is_kept = error && move.op == Op::kWrite && is_of_memory(error);
    if (error && !is_kept) given_up.swap(slot.memory);  // a device that hangs may still use it
    if (table == nullptr) return;
    SumTable::Page& page = table->pages_[slot.page];
    if (!error) {
      const std::uint32_t digest = crc32c(slot.memory.get(), kBlockNbytes);
      if (move.op == Op::kWrite) {
        slot.changed = page.is_fresh = false;
        page.digest = digest;
      }
      if (digest == page.digest) return;
      error = made_error([&] {
        return CorruptionError(
            concat("the checksums in ", engine.file(move.place.file).path, " at offset ",
                   move.place.offset, " are not those that were written: wrote ",
                   in_hex(page.digest), ", read ", in_hex(digest),
                   ". The disk or its file was changed or lost a write; resume from the last "
                   "checkpoint, on another disk if it happens again"));
      });
    }
    if (is_kept) {
      end_uses([&](const Use& use) {
        return use.place.file == move.place.file &&
               use.table->pages_[use.page].slot == SumTable::kAway;
      });
    } else {
      page.slot = move.op == Op::kWrite ? SumTable::kLost : SumTable::kAway;
      slot.table.reset();
      if (move.op == Op::kWrite) {
        table->lost_ = error;
        return;
      }
      end_uses([&](const Use& use) { return use.table == table && use.page == slot.page; });
    }
  }
  for (const Use& use : over) use.ticket->part_done(error);
}

// True if the use is over: its sums were moved, or its page is lost.
bool SumCache::try_use(Use& use, std::vector<Move>& moves) {
  SumTable::Page& page = use.table->pages_[use.page];
  if (page.slot == SumTable::kLost) {
    use.error = use.table->lost_;
    return true;
  }
  if (page.slot == SumTable::kAway && !bring(use, moves)) return false;
  Slot& slot = shares_[use.place.file].slots[page.slot];
  if (slot.moving) return false;
  std::uint32_t *const there = slot.sums() + use.first, *const here = use.sums->data() + use.at;
  if (use.op == Op::kRead)
    std::copy_n(there, use.count, here);
  else
    std::copy_n(here, use.count, there);
  slot.used = true;
  slot.changed |= use.op == Op::kWrite;
  return true;
}

// Gives the page of a use a slot, into which it is read unless it is fresh. False if none is free.
bool SumCache::bring(const Use& use, std::vector<Move>& moves) {
  Share& share = shares_[use.place.file];
  const int index = free_slot(share, moves);
  if (index < 0) return false;
  SumTable& table = *use.table;
  SumTable::Page& page = table.pages_[use.page];
  Slot& slot = share.slots[index];
  if (!slot.memory) slot.memory = aligned_memory(kBlockNbytes);
  if (page.is_fresh) {
    std::fill_n(slot.sums(), SumTable::kPageSums, sum_of_zeros(kChecksumNbytes));
    const std::size_t rest = table.nbytes_ % kChecksumNbytes;
    const std::size_t last = table.nbytes_ / kChecksumNbytes;
    if (rest != 0 && last / SumTable::kPageSums == use.page)
      slot.sums()[last % SumTable::kPageSums] = sum_of_zeros(rest);
  } else {
    moves.push_back({Op::kRead, use.place, index, slot.memory});
    slot.moving = true;
  }
  slot.table = use.table;
  slot.page = use.page;
  slot.used = true;
  slot.changed = false;
  page.slot = index;
  return true;
}

// An empty slot, or -1: then one page more is on its way to the disk for each use that found none.
int SumCache::free_slot(Share& share, std::vector<Move>& moves) {
  for (std::size_t looked = 0; looked < 2 * share.slots.size(); ++looked) {
    const int index = static_cast<int>(share.hand);
    share.hand = (share.hand + 1) % share.slots.size();
    Slot& slot = share.slots[index];
    if (slot.moving) continue;
    const std::shared_ptr<SumTable> table = slot.table.lock();
    if (table == nullptr) return index;
    if (std::exchange(slot.used, false)) continue;
    if (!slot.changed) {
      table->pages_[slot.page].slot = SumTable::kAway;
      slot.table.reset();
      return index;
    }
    if (share.leaving > share.wanting) continue;
    moves.push_back({Op::kWrite,
                     table->volume_->place(table->offset_ + slot.page * kBlockNbytes, kBlockNbytes),
                     index, slot.memory});
    slot.moving = true;
    ++share.leaving;
  }
  ++share.wanting;
  return -1;
}

}  // namespace infinity
