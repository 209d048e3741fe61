#include "io/extent.h"

#include <algorithm>

#include "base/check.h"
#include "base/crc32c.h"

namespace infinity {

Extent Extent::in_volume(std::shared_ptr<const Volume> volume, std::uint64_t offset,
                         std::size_t nbytes, const std::shared_ptr<SumCache>& sums) {
  INFINITY_REQUIRE(nbytes > 0 && nbytes % kBlockNbytes == 0 && offset % kBlockNbytes == 0,
                   "an extent of ", nbytes, " bytes at offset ", offset,
                   ": both must be multiples of ", kBlockNbytes);
  Extent extent;
  extent.volume_ = std::move(volume);
  extent.offset_ = offset;
  extent.nbytes_ = nbytes;
  if (sums) {
    extent.books_->table =
        std::make_shared<SumTable>(sums, extent.volume_, offset + nbytes, nbytes);
    return extent;
  }
  extent.books_->checksums.assign(checksum_count(nbytes), sum_of_zeros(kChecksumNbytes));
  if (const std::size_t rest = nbytes % kChecksumNbytes)
    extent.books_->checksums.back() = sum_of_zeros(rest);
  return extent;
}

Extent Extent::unknown(int file, std::uint64_t offset, std::size_t nbytes) {
  Extent extent = in_file(file, offset, nbytes);
  extent.known_ = false;
  return extent;
}

std::vector<Request> Extent::requests(Op op, std::size_t at, Span span,
                                      const std::shared_ptr<void>& memory) const {
  check(at, span.nbytes);
  std::vector<Request> found;
  std::size_t done = 0;
  do {  // an empty span is one request, which the engine refuses
    const Volume::Place place = volume_->place(offset_ + at + done, span.nbytes - done);
    found.push_back({op, place.file, place.offset, {span.data + done, place.nbytes}, memory});
    done += place.nbytes;
  } while (done < span.nbytes);
  return found;
}

std::vector<TicketPtr> Extent::writes_over(std::size_t at, std::size_t nbytes) const {
  Books& books = *books_;
  Lock lock(books.mutex);
  auto& writes = books.under_way;
  writes.remove_if([](const Write& write) { return write.ticket->succeeded(); });
  std::vector<TicketPtr> found;
  for (const Write& write : writes)
    if (write.at < at + nbytes && at < write.at + write.nbytes) found.push_back(write.ticket);
  return found;
}

// The checksums of one transfer's blocks. Each piece adds its share of a block's sum.
class Extent::BlockSums : public PieceWork {
 public:
  explicit BlockSums(Span span) : span_(span), sums_(checksum_count(span.nbytes)) {}

  void look_at(Span piece) override {
    std::size_t begin = static_cast<std::size_t>(piece.data - span_.data);
    for (const std::size_t end = begin + piece.nbytes; begin < end;) {
      const std::size_t index = begin / kChecksumNbytes,
                        block_end = std::min(span_.nbytes, (index + 1) * kChecksumNbytes);
      const std::size_t nbytes = std::min(end, block_end) - begin,
                        behind = block_end - begin - nbytes;
      const std::uint32_t sum = crc32c(span_.data + begin, nbytes);
      sums_[index].fetch_xor(behind ? crc32c_before(sum, behind) : sum, std::memory_order_relaxed);
      begin += nbytes;
    }
  }

  // Once the last piece has ended.
  Sums sums() const {
    return std::make_shared<std::vector<std::uint32_t>>(sums_.begin(), sums_.end());
  }

 private:
  const Span span_;
  std::vector<std::atomic<std::uint32_t>> sums_;
};

TicketPtr Extent::read(IoEngine& engine, std::size_t at, Span span, const TicketPtr& after,
                       const std::shared_ptr<void>& memory, bool checksum) const {
  std::vector<Request> wanted = requests(Op::kRead, at, span, memory);
  const TicketPtr before = settled(at, span.nbytes, after);
  if (!checksum) return engine.submit(wanted, before);
  const auto sums = std::make_shared<BlockSums>(span);
  for (Request& each : wanted) each.work = sums;
  if (!known_) return engine.submit(wanted, before, recording(at, sums, engine));
  const Expected known = expected(at, span.nbytes, engine, before);
  return engine.submit(wanted, before,
                       [extent = *this, at, sums, known, &engine](const TicketPtr& ticket) {
                         const auto compare = [=, &engine](std::exception_ptr error) {
                           try {
                             if (!error) extent.compare(at, *sums->sums(), known.sums, at, engine);
                           } catch (...) {
                             error = std::current_exception();
                           }
                           ticket->part_done(error);
                         };
                         if (!known.ticket) return compare(nullptr);
                         Ticket::Callbacks follow;
                         try {
                           follow.push_back(compare);
                         } catch (...) {  // no memory
                           return ticket->part_done(std::current_exception());
                         }
                         known.ticket->on_done(std::move(follow));
                       });
}

// What follows a transfer whose checksums are to be recorded.
IoEngine::Then Extent::recording(std::size_t at, const std::shared_ptr<BlockSums>& sums,
                                 IoEngine& engine) const {
  return [extent = *this, at, sums, &engine](const TicketPtr& ticket) {
    TicketPtr recorded;
    try {
      recorded = extent.record(at, sums->sums(), engine);
    } catch (...) {
      return ticket->part_done(std::current_exception());
    }
    ticket->part_follows(recorded);
  };
}

TicketPtr Extent::settled(std::size_t at, std::size_t nbytes, const TicketPtr& after) const {
  std::vector<TicketPtr> before = writes_over(at, nbytes);
  if (after) before.push_back(after);
  return joined(before);
}

bool Extent::written(std::size_t at, std::size_t nbytes, const Sums& expected) const {
  check(at, nbytes);
  const std::size_t rest = nbytes % kChecksumNbytes;
  const auto last = expected->end() - (rest != 0);
  return std::find(expected->begin(), last, sum_of_zeros(kChecksumNbytes)) == last &&
         (rest == 0 || *last != sum_of_zeros(rest));
}

TicketPtr Extent::write(IoEngine& engine, std::size_t at, Span span,
                        const std::shared_ptr<void>& memory, bool checksum) {
  std::vector<Request> wanted = requests(Op::kWrite, at, span, memory);
  IoEngine::Then then;
  if (checksum) {
    const auto sums = std::make_shared<BlockSums>(span);
    for (Request& each : wanted) each.work = sums;
    then = recording(at, sums, engine);
  }
  std::vector<TicketPtr> before = writes_over(at, span.nbytes);
  // A failed write is repaired by this one.
  before.erase(std::remove_if(before.begin(), before.end(),
                              [](const TicketPtr& ticket) { return ticket->done(); }),
               before.end());
  std::list<Write> one{{at, span.nbytes, nullptr}};
  const TicketPtr ticket = engine.submit(wanted, joined(before), std::move(then));
  one.front().ticket = ticket;  // nothing can fail from here on: the write is under way
  if (!checksum && !has_table())  // unknown, but not those of what was never written
    std::fill_n(books_->checksums.begin() + static_cast<std::ptrdiff_t>(at / kChecksumNbytes),
                checksum_count(span.nbytes), ~sum_of_zeros(kChecksumNbytes));
  Books& books = *books_;
  Lock lock(books.mutex);
  auto& writes = books.under_way;
  const auto made_good = [&](const Write& write) {
    return write.ticket->done() && at <= write.at && write.at + write.nbytes <= at + span.nbytes;
  };
  writes.remove_if(made_good);
  writes.splice(writes.end(), one);
  return ticket;
}

std::uint32_t Extent::checksum(std::size_t nbytes) const {
  if (nbytes > 0) check(0, nbytes);
  INFINITY_REQUIRE(!has_table(), "the checksum of an extent whose checksums are on disk");
  std::uint32_t joined = 0;
  for (std::size_t at = 0; at < nbytes; at += kChecksumNbytes)
    joined = crc32c_before(joined, std::min(kChecksumNbytes, nbytes - at)) ^
             books_->checksums[at / kChecksumNbytes];
  return joined;
}

Extent::Expected Extent::expected(std::size_t at, std::size_t nbytes, IoEngine& engine,
                                  const TicketPtr& after) const {
  check(at, nbytes);
  const auto sums = std::make_shared<std::vector<std::uint32_t>>(checksum_count(nbytes));
  const auto begin = [books = books_, first = at / kChecksumNbytes, sums, &engine]() -> TicketPtr {
    if (books->table) return books->table->move(Op::kRead, first, sums, engine);
    std::copy_n(books->checksums.begin() + static_cast<std::ptrdiff_t>(first), sums->size(),
                sums->begin());
    return nullptr;
  };
  if (!after) return {sums, begin()};
  const auto ticket = std::make_shared<Ticket>(1);
  ticket->on_hurry([after] { after->hurry(); });
  after->on_done([begin, ticket](std::exception_ptr error) {
    TicketPtr moved;
    try {
      if (!error) moved = begin();
    } catch (...) {  // no memory
      error = std::current_exception();
    }
    if (error) return ticket->part_done(error);
    ticket->part_follows(moved);
  });
  return {sums, ticket};
}

TicketPtr Extent::record(std::size_t at, const Sums& sums, IoEngine& engine) const {
  const std::size_t first = at / kChecksumNbytes;
  if (has_table()) return books_->table->move(Op::kWrite, first, sums, engine);
  std::copy(sums->begin(), sums->end(),
            books_->checksums.begin() + static_cast<std::ptrdiff_t>(first));
  return nullptr;
}

void Extent::compare(std::size_t at, const std::vector<std::uint32_t>& found, const Sums& expected,
                     std::size_t from, const IoEngine& engine) const {
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::uint32_t wrote = (*expected)[(at - from) / kChecksumNbytes + i];
    if (found[i] == wrote) continue;
    throw CorruptionError(
        concat("checksum mismatch in ", where(engine, at + i * kChecksumNbytes), " (version ",
               version(), "): wrote ", in_hex(wrote), ", read ", in_hex(found[i]),
               ". The disk or its file was changed or lost a write; resume from the last "
               "checkpoint, on another disk if it happens again"));
  }
}

void Extent::remember(std::size_t at, Span span, IoEngine& engine) const {
  check(at, span.nbytes);
  const auto sums = std::make_shared<std::vector<std::uint32_t>>(checksum_count(span.nbytes));
  crc32c_blocks(span.data, span.nbytes, sums->data());
  if (const TicketPtr recorded = record(at, sums, engine)) recorded->wait();
}

void Extent::verify(std::size_t at, Span span, IoEngine& engine) const {
  const Expected known = expected(at, span.nbytes, engine);
  std::vector<std::uint32_t> found(checksum_count(span.nbytes));
  crc32c_blocks(span.data, span.nbytes, found.data());
  if (known.ticket) known.ticket->wait();
  compare(at, found, known.sums, at, engine);
}

// "/scratch/a at offset 4096", of the checksum block at byte `at`: two places if it crosses a
// stripe.
std::string Extent::where(const IoEngine& engine, std::size_t at) const {
  std::string found;
  const std::size_t end = std::min(nbytes_, at + kChecksumNbytes);
  while (at < end) {
    const Volume::Place place = volume_->place(offset_ + at, end - at);
    found += concat(found.empty() ? "" : " or ", engine.file(place.file).path, " at offset ",
                    place.offset);
    at += place.nbytes;
  }
  return found;
}

void Extent::check(std::size_t at, std::size_t nbytes) const {
  INFINITY_REQUIRE(is_file(),
                   "a transfer of an extent in memory: its bytes are where they are used");
  INFINITY_REQUIRE(at % kChecksumNbytes == 0 && at < nbytes_ && nbytes <= nbytes_ - at &&
                       (nbytes % kChecksumNbytes == 0 || at + nbytes == nbytes_),
                   "bytes ", at, " to ", at + nbytes, " of an extent of ", nbytes_,
                   ": outside it, or not whole blocks of ", kChecksumNbytes);
}

}  // namespace infinity
