#include "io/volume.h"

#include <algorithm>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/span.h"

namespace infinity {
namespace {
// of a member: what is multiplied below fits 64 bits
constexpr std::uint64_t kMaxStripes = std::uint64_t{1} << 30;
}  // namespace

std::shared_ptr<const Volume> Volume::of(int file) {
  const auto volume = std::make_shared<Volume>();
  volume->members_ = 1;
  volume->files_ = {file};
  return volume;
}

std::vector<std::uint64_t> Volume::lay_out(std::size_t stripe_nbytes,
                                           const std::vector<std::uint64_t>& counts,
                                           std::uint64_t skipped, std::uint64_t nbytes) {
  INFINITY_REQUIRE(members_ == 0, "this volume was laid out already");
  INFINITY_REQUIRE(stripe_nbytes > 0 && stripe_nbytes % kChecksumNbytes == 0, "stripes of ",
                   stripe_nbytes, " bytes are not whole checksum blocks of ", kChecksumNbytes);
  INFINITY_REQUIRE(nbytes > 0 && nbytes % kBlockNbytes == 0, "a volume of ", nbytes,
                   " bytes is not a positive multiple of ", kBlockNbytes);
  INFINITY_REQUIRE(!counts.empty(), "a volume without members");
  const std::uint64_t wanted = (nbytes + stripe_nbytes - 1) / stripe_nbytes;
  std::uint64_t held = 0;
  for (const std::uint64_t count : counts) {
    INFINITY_REQUIRE(count <= kMaxStripes, "a member of ", count, " stripes: more than ",
                     kMaxStripes);
    held += count;
  }
  INFINITY_REQUIRE(held >= wanted, "a volume of ", nbytes, " bytes in ", held, " stripes of ",
                   stripe_nbytes);

  stripe_nbytes_ = stripe_nbytes;
  members_ = counts.size();
  if (members_ == 1) return {nbytes};
  std::vector<std::uint64_t> turns(members_), used(members_);
  stripes_.reserve(wanted);
  while (stripes_.size() < wanted) {
    // Whose next stripe has its middle first, were each member to hand its stripes out evenly over
    // the same time.
    std::size_t next = members_;
    for (std::size_t each = 0; each < members_; ++each) {
      if (used[each] == counts[each]) continue;
      if (next == members_ ||
          (2 * turns[each] + 1) * counts[next] < (2 * turns[next] + 1) * counts[each])
        next = each;
    }
    ++turns[next];
    if (skipped > 0) {
      --skipped;
      continue;
    }
    stripes_.push_back(
        {static_cast<std::uint32_t>(next), static_cast<std::uint32_t>(used[next]++)});
  }
  std::vector<std::uint64_t> sizes;
  for (const std::uint64_t count : used) sizes.push_back(count * stripe_nbytes);
  sizes[stripes_.back().member] -= wanted * stripe_nbytes - nbytes;
  return sizes;
}

void Volume::set_files(const std::vector<int>& files) {
  INFINITY_REQUIRE(members_ > 0 && files.size() == members_, files.size(),
                   " files for a volume of ", members_, " members");
  files_ = files;
}

Volume::Place Volume::place(std::uint64_t at, std::size_t nbytes) const {
  INFINITY_REQUIRE(!files_.empty(), "a transfer of a volume that has no files yet");
  if (members_ == 1) return {files_.front(), at, nbytes};
  const std::uint64_t index = at / stripe_nbytes_, inside = at % stripe_nbytes_;
  INFINITY_REQUIRE(index < stripes_.size(), "byte ", at, " of a volume of ", stripes_.size(),
                   " stripes of ", stripe_nbytes_);
  const Stripe& stripe = stripes_[index];
  return {files_[stripe.member], stripe.index * static_cast<std::uint64_t>(stripe_nbytes_) + inside,
          std::min<std::uint64_t>(nbytes, stripe_nbytes_ - inside)};
}

}  // namespace infinity
