#include "io/extent.h"

#include <algorithm>

#include "base/check.h"
#include "base/crc32c.h"

namespace infinity {

Extent Extent::in_file(int file, std::uint64_t offset, std::size_t nbytes) {
  INFINITY_REQUIRE(nbytes > 0 && nbytes % kBlockNbytes == 0 && offset % kBlockNbytes == 0, "an extent of ", nbytes,
                   " bytes at offset ", offset, ": both must be multiples of ", kBlockNbytes);
  Extent extent;
  extent.file_ = file;
  extent.offset_ = offset;
  extent.nbytes_ = nbytes;
  const std::vector<std::byte> zeros(std::min(nbytes, kChecksumNbytes));
  extent.checksums_.assign(checksum_count(nbytes), crc32c(zeros.data(), zeros.size()));
  if (const std::size_t rest = nbytes % kChecksumNbytes) extent.checksums_.back() = crc32c(zeros.data(), rest);
  return extent;
}

Request Extent::request(Op op, std::size_t at, Span span, std::shared_ptr<void> memory) const {
  check(at, span.nbytes);
  return {op, file_, offset_ + at, span, std::move(memory)};
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
                       std::shared_ptr<void> memory) const {
  const Request wanted = request(Op::kRead, at, span, std::move(memory));
  std::vector<TicketPtr> before = writes_over(at, span.nbytes);
  if (after) before.push_back(after);
  return engine.submit({wanted}, joined(before));
}

TicketPtr Extent::write(IoEngine& engine, std::size_t at, Span span, std::shared_ptr<void> memory, bool checksum) {
  const Request wanted = request(Op::kWrite, at, span, std::move(memory));
  engine.validate(wanted);
  std::vector<TicketPtr> before = writes_over(at, span.nbytes);
  // One that failed is made good by this one.
  before.erase(std::remove_if(before.begin(), before.end(), [](const TicketPtr& ticket) { return ticket->done(); }),
               before.end());
  if (checksum) remember(at, span);
  const TicketPtr ticket = engine.submit({wanted}, joined(before));
  std::lock_guard<std::mutex> lock(writes_->mutex);
  auto& writes = writes_->under_way;
  const auto made_good = [&](const Write& write) {
    return write.ticket->done() && at <= write.at && write.at + write.nbytes <= at + span.nbytes;
  };
  writes.erase(std::remove_if(writes.begin(), writes.end(), made_good), writes.end());
  writes.push_back({at, span.nbytes, ticket});
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
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::uint32_t expected = checksums_[at / kChecksumNbytes + i];
    if (found[i] != expected)
      throw CorruptionError(concat("checksum mismatch in ", engine.file(file_).path, " at offset ",
                                   offset_ + at + i * kChecksumNbytes, " (version ", version, "): wrote ", std::hex,
                                   expected, ", read ", found[i],
                                   ". The disk or its file was changed or lost a write; resume from the last "
                                   "checkpoint, on another disk if it happens again"));
  }
}

void Extent::check(std::size_t at, std::size_t nbytes) const {
  INFINITY_REQUIRE(is_file(), "a transfer of an extent in memory: its bytes are where they are used");
  INFINITY_REQUIRE(at % kChecksumNbytes == 0 && at < nbytes_ && nbytes <= nbytes_ - at &&
                       (nbytes % kChecksumNbytes == 0 || at + nbytes == nbytes_),
                   "bytes ", at, " to ", at + nbytes, " of an extent of ", nbytes_, ": outside it, or not whole blocks of ",
                   kChecksumNbytes);
}

}  // namespace infinity
