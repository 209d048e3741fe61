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
  const std::vector<std::byte> zeros(std::min(nbytes, kChecksumNbytes));
  extent.books_->checksums.assign(checksum_count(nbytes), crc32c(zeros.data(), zeros.size()));
  if (const std::size_t rest = nbytes % kChecksumNbytes)
    extent.books_->checksums.back() = crc32c(zeros.data(), rest);
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
  writes.erase(std::remove_if(writes.begin(), writes.end(),
                              [](const Write& write) { return write.ticket->succeeded(); }),
               writes.end());
  std::vector<TicketPtr> found;
  for (const Write& write : writes)
    if (write.at < at + nbytes && at < write.at + write.nbytes) found.push_back(write.ticket);
  return found;
}

// The checksums of one transfer's blocks. Each piece adds its share of a block's sum; the last one
// completes it.
class Extent::BlockSums : public PieceWork {
 public:
  BlockSums(const Extent& extent, Op op, std::size_t at, Span span, IoEngine& engine)
      : extent_(extent),
        op_(op),
        at_(at),
        span_(span),
        engine_(engine),
        blocks_(checksum_count(span.nbytes)) {
    for (std::size_t i = 0; i < blocks_.size(); ++i)
      blocks_[i].missing = std::min(kChecksumNbytes, span.nbytes - i * kChecksumNbytes);
  }

  void look_at(Span piece) override {
    std::size_t begin = static_cast<std::size_t>(piece.data - span_.data);
    for (const std::size_t end = begin + piece.nbytes; begin < end;) {
      const std::size_t index = begin / kChecksumNbytes,
                        block_end = std::min(span_.nbytes, (index + 1) * kChecksumNbytes);
      const std::size_t nbytes = std::min(end, block_end) - begin;
      add(index, crc32c(span_.data + begin, nbytes), nbytes, block_end - begin - nbytes);
      begin += nbytes;
    }
  }

 private:
  struct Block {
    std::atomic<std::uint32_t> sum{0};
    std::atomic<std::size_t> missing{0};
  };

  void add(std::size_t index, std::uint32_t sum, std::size_t nbytes, std::size_t behind) {
    Block& block = blocks_[index];
    block.sum.fetch_xor(behind ? crc32c_before(sum, behind) : sum, std::memory_order_relaxed);
    if (block.missing.fetch_sub(nbytes, std::memory_order_acq_rel) != nbytes) return;
    const std::size_t known = at_ / kChecksumNbytes + index;
    if (op_ == Op::kWrite || !extent_.known_)
      extent_.note(known, block.sum, engine_);
    else
      extent_.hold(known, block.sum, engine_);
  }

  const Extent extent_;  // shares the books
  const Op op_;
  const std::size_t at_;
  const Span span_;
  IoEngine& engine_;  // outlives its work
  std::vector<Block> blocks_;
};

TicketPtr Extent::read(IoEngine& engine, std::size_t at, Span span, const TicketPtr& after,
                       const std::shared_ptr<void>& memory, bool checksum) const {
  std::vector<Request> wanted = requests(Op::kRead, at, span, memory);
  if (checksum) {
    const auto sums = std::make_shared<BlockSums>(*this, Op::kRead, at, span, engine);
    for (Request& each : wanted) each.work = sums;
  }
  return engine.submit(wanted, settled(at, span.nbytes, after));
}

TicketPtr Extent::settled(std::size_t at, std::size_t nbytes, const TicketPtr& after) const {
  std::vector<TicketPtr> before = writes_over(at, nbytes);
  if (after) before.push_back(after);
  return joined(before);
}

bool Extent::written(std::size_t at, std::size_t nbytes) const {
  check(at, nbytes);
  Books& books = *books_;
  Lock lock(books.mutex);
  const std::vector<bool>& sent = books.sent;
  const auto first = static_cast<std::ptrdiff_t>(at / kChecksumNbytes);
  const auto last = first + static_cast<std::ptrdiff_t>(checksum_count(nbytes));
  return last <= static_cast<std::ptrdiff_t>(sent.size()) &&
         std::all_of(sent.begin() + first, sent.begin() + last, [](bool each) { return each; });
}

TicketPtr Extent::write(IoEngine& engine, std::size_t at, Span span,
                        const std::shared_ptr<void>& memory, bool checksum) {
  std::vector<Request> wanted = requests(Op::kWrite, at, span, memory);
  if (checksum) {
    const auto sums = std::make_shared<BlockSums>(*this, Op::kWrite, at, span, engine);
    for (Request& each : wanted) each.work = sums;
  }
  std::vector<TicketPtr> before = writes_over(at, span.nbytes);
  // A failed write is repaired by this one.
  before.erase(std::remove_if(before.begin(), before.end(),
                              [](const TicketPtr& ticket) { return ticket->done(); }),
               before.end());
  const TicketPtr ticket = engine.submit(wanted, joined(before));
  Books& books = *books_;
  Lock lock(books.mutex);
  auto& writes = books.under_way;
  const auto made_good = [&](const Write& write) {
    return write.ticket->done() && at <= write.at && write.at + write.nbytes <= at + span.nbytes;
  };
  writes.erase(std::remove_if(writes.begin(), writes.end(), made_good), writes.end());
  writes.push_back({at, span.nbytes, ticket});
  if (has_table()) return ticket;
  const auto first = static_cast<std::ptrdiff_t>(at / kChecksumNbytes);
  std::vector<bool>& sent = books.sent;
  sent.resize(checksum_count(nbytes_));
  std::fill_n(sent.begin() + first, checksum_count(span.nbytes), true);
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

void Extent::remember(std::size_t at, Span span, IoEngine& engine) {
  check(at, span.nbytes);
  std::vector<std::uint32_t> sums(checksum_count(span.nbytes));
  crc32c_blocks(span.data, span.nbytes, sums.data());
  for (std::size_t i = 0; i < sums.size(); ++i) note(at / kChecksumNbytes + i, sums[i], engine);
}

void Extent::verify(std::size_t at, Span span, IoEngine& engine) const {
  check(at, span.nbytes);
  std::vector<std::uint32_t> found(checksum_count(span.nbytes));
  crc32c_blocks(span.data, span.nbytes, found.data());
  verify_sums(at, found, engine);
}

void Extent::verify_sums(std::size_t at, const std::vector<std::uint32_t>& found,
                         IoEngine& engine) const {
  for (std::size_t i = 0; i < found.size(); ++i) hold(at / kChecksumNbytes + i, found[i], engine);
}

// Records the checksum of a block.
void Extent::note(std::size_t block, std::uint32_t sum, IoEngine& engine) const {
  if (has_table())
    books_->table->set(block, sum, engine);
  else
    books_->checksums[block] = sum;
}

// Compares the checksum of a block that was read with the one that was written. Throws
// CorruptionError.
void Extent::hold(std::size_t block, std::uint32_t found, IoEngine& engine) const {
  const std::uint32_t expected =
      has_table() ? books_->table->get(block, engine) : books_->checksums[block];
  if (found == expected) return;
  throw CorruptionError(
      concat("checksum mismatch in ", where(engine, block * kChecksumNbytes), " (version ",
             version(), "): wrote ", in_hex(expected), ", read ", in_hex(found),
             ". The disk or its file was changed or lost a write; resume from the last "
             "checkpoint, on another disk if it happens again"));
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
