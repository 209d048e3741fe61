#include "io/extent.h"

#include <algorithm>

#include "base/check.h"
#include "base/crc32c.h"

namespace infinity {

Extent Extent::in_volume(std::shared_ptr<const Volume> volume, std::uint64_t offset, std::size_t nbytes) {
  INFINITY_REQUIRE(nbytes > 0 && nbytes % kBlockNbytes == 0 && offset % kBlockNbytes == 0, "an extent of ", nbytes,
                   " bytes at offset ", offset, ": both must be multiples of ", kBlockNbytes);
  Extent extent;
  extent.volume_ = std::move(volume);
  extent.offset_ = offset;
  extent.nbytes_ = nbytes;
  const std::vector<std::byte> zeros(std::min(nbytes, kChecksumNbytes));
  extent.checksums_.assign(checksum_count(nbytes), crc32c(zeros.data(), zeros.size()));
  if (const std::size_t rest = nbytes % kChecksumNbytes) extent.checksums_.back() = crc32c(zeros.data(), rest);
  return extent;
}

std::vector<Request> Extent::requests(Op op, std::size_t at, Span span, const std::shared_ptr<void>& memory) const {
  check(at, span.nbytes);
  std::vector<Request> found;
  std::size_t done = 0;
  do {  // nothing is a request too, for the engine to refuse
    const Volume::Place place = volume_->place(offset_ + at + done, span.nbytes - done);
    found.push_back({op, place.file, place.offset, {span.data + done, place.nbytes}, memory});
    done += place.nbytes;
  } while (done < span.nbytes);
  return found;
}

std::vector<TicketPtr> Extent::writes_over(std::size_t at, std::size_t nbytes) const {
  std::lock_guard<std::mutex> lock(writes_->mutex);
  auto& writes = writes_->under_way;
  writes.erase(std::remove_if(writes.begin(), writes.end(), [](const Write& write) { return write.ticket->succeeded(); }),
               writes.end());
  std::vector<TicketPtr> found;
  for (const Write& write : writes)
    if (write.at < at + nbytes && at < write.at + write.nbytes) found.push_back(write.ticket);
  return found;
}

TicketPtr Extent::read(IoEngine& engine, std::size_t at, Span span, const TicketPtr& after,
                       const std::shared_ptr<void>& memory) const {
  const std::vector<Request> wanted = requests(Op::kRead, at, span, memory);
  return engine.submit(wanted, settled(at, span.nbytes, after));
}

TicketPtr Extent::settled(std::size_t at, std::size_t nbytes, const TicketPtr& after) const {
  std::vector<TicketPtr> before = writes_over(at, nbytes);
  if (after) before.push_back(after);
  return joined(before);
}

bool Extent::written(std::size_t at, std::size_t nbytes) const {
  check(at, nbytes);
  std::lock_guard<std::mutex> lock(writes_->mutex);
  const std::vector<bool>& sent = writes_->sent;
  const auto first = static_cast<std::ptrdiff_t>(at / kChecksumNbytes);
  const auto last = first + static_cast<std::ptrdiff_t>(checksum_count(nbytes));
  return last <= static_cast<std::ptrdiff_t>(sent.size()) &&
         std::all_of(sent.begin() + first, sent.begin() + last, [](bool each) { return each; });
}

TicketPtr Extent::write(IoEngine& engine, std::size_t at, Span span, const std::shared_ptr<void>& memory, bool checksum) {
  const std::vector<Request> wanted = requests(Op::kWrite, at, span, memory);
  for (const Request& each : wanted) engine.validate(each);
  std::vector<TicketPtr> before = writes_over(at, span.nbytes);
  // One that failed is made good by this one.
  before.erase(std::remove_if(before.begin(), before.end(), [](const TicketPtr& ticket) { return ticket->done(); }),
               before.end());
  if (checksum) remember(at, span);
  const TicketPtr ticket = engine.submit(wanted, joined(before));
  std::lock_guard<std::mutex> lock(writes_->mutex);
  auto& writes = writes_->under_way;
  const auto made_good = [&](const Write& write) {
    return write.ticket->done() && at <= write.at && write.at + write.nbytes <= at + span.nbytes;
  };
  writes.erase(std::remove_if(writes.begin(), writes.end(), made_good), writes.end());
  writes.push_back({at, span.nbytes, ticket});
  const auto first = static_cast<std::ptrdiff_t>(at / kChecksumNbytes);
  std::vector<bool>& sent = writes_->sent;
  sent.resize(checksum_count(nbytes_));
  std::fill_n(sent.begin() + first, checksum_count(span.nbytes), true);
  return ticket;
}

void Extent::remember(std::size_t at, Span span) {
  check(at, span.nbytes);
  crc32c_blocks(span.data, span.nbytes, &checksums_[at / kChecksumNbytes]);
}

void Extent::verify(std::size_t at, Span span, const IoEngine& engine) const {
  check(at, span.nbytes);
  std::vector<std::uint32_t> found(checksum_count(span.nbytes));
  crc32c_blocks(span.data, span.nbytes, found.data());
  verify_sums(at, found, engine);
}

void Extent::verify_sums(std::size_t at, const std::vector<std::uint32_t>& found, const IoEngine& engine) const {
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::uint32_t expected = checksums_[at / kChecksumNbytes + i];
    if (found[i] != expected)
      throw CorruptionError(concat("checksum mismatch in ", where(engine, at + i * kChecksumNbytes), " (version ", version,
                                   "): wrote ", std::hex, expected, ", read ", found[i],
                                   ". The disk or its file was changed or lost a write; resume from the last "
                                   "checkpoint, on another disk if it happens again"));
  }
}

// "/scratch/a at offset 4096": both, where the checksum block at byte `at` ends in another stripe than it begins in.
std::string Extent::where(const IoEngine& engine, std::size_t at) const {
  std::string found;
  const std::size_t end = std::min(nbytes_, at + kChecksumNbytes);
  while (at < end) {
    const Volume::Place place = volume_->place(offset_ + at, end - at);
    found += concat(found.empty() ? "" : " or ", engine.file(place.file).path, " at offset ", place.offset);
    at += place.nbytes;
  }
  return found;
}

void Extent::check(std::size_t at, std::size_t nbytes) const {
  INFINITY_REQUIRE(is_file(), "a transfer of an extent in memory: its bytes are where they are used");
  INFINITY_REQUIRE(at % kChecksumNbytes == 0 && at < nbytes_ && nbytes <= nbytes_ - at &&
                       (nbytes % kChecksumNbytes == 0 || at + nbytes == nbytes_),
                   "bytes ", at, " to ", at + nbytes, " of an extent of ", nbytes_, ": outside it, or not whole blocks of ",
                   kChecksumNbytes);
}

}  // namespace infinity
