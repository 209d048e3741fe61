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
  volume->members_.push_back({1, 0});
  volume->files_ = {file};
  return volume;
}

std::vector<std::uint64_t> Volume::lay_out(std::size_t stripe_nbytes,
                                           const std::vector<std::uint64_t>& counts,
                                           std::uint64_t skipped, std::uint64_t nbytes) {
  INFINITY_REQUIRE(members_.empty(), "this volume was laid out already");
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
  skipped_ = skipped, stripes_ = wanted, all_ = held;
  for (const std::uint64_t count : counts) members_.push_back({count, 0});
  if (members_.size() == 1) return {nbytes};
  for (std::uint64_t turn = 0; turn < skipped; ++turn) {
    std::size_t next = 0;
    for (std::size_t each = 1; each < members_.size(); ++each) {
      const Member &left = members_[each], &right = members_[next];
      if (right.count == 0 ||
          (2 * left.skipped + 1) * right.count < (2 * right.skipped + 1) * left.count)
        next = each;
    }
    ++members_[next].skipped;
  }
  std::vector<std::uint64_t> sizes;
  for (std::size_t each = 0; each < members_.size(); ++each)
    sizes.push_back((first_turn(each, skipped + wanted) - members_[each].skipped) * stripe_nbytes);
  sizes[stripe(wanted - 1).first] -= wanted * stripe_nbytes - nbytes;
  return sizes;
}

// How many turns of all members come before a turn of one. Of two at one time the first member's
// does.
std::uint64_t Volume::turns_before(std::size_t member, std::uint64_t turn) const {
  std::uint64_t before = 0;
  for (std::size_t each = 0; each < members_.size(); ++each) {
    const Member& other = members_[each];
    // Turn u is before if (2 u + 1) / other.count < (2 turn + 1) / count.
    const std::uint64_t odd =
        ((2 * turn + 1) * other.count - (each >= member)) / members_[member].count;
    before += std::min(other.turns(), (odd + 1) / 2);
  }
  return before;
}

// The first turn of a member that comes after `at` turns of all; its number of turns if none does.
std::uint64_t Volume::first_turn(std::size_t member, std::uint64_t at) const {
  const std::uint64_t turns = members_[member].turns();
  if (members_[member].count == 0) return turns;
  const auto is_after = [&](std::uint64_t turn) { return turns_before(member, turn) >= at; };
  // It is within a few turns of its share, but where another member holds no more.
  const auto guess = static_cast<std::uint64_t>(static_cast<double>(at) *
                                                static_cast<double>(members_[member].count) /
                                                static_cast<double>(all_));
  std::uint64_t low = std::min(guess, turns), high = low;  // low: all before are not after
  for (std::uint64_t step = 1; low > 0 && is_after(low - 1); step *= 2)
    high = low - 1, low -= std::min(low, step);
  for (std::uint64_t step = 1; high < turns && !is_after(high); step *= 2)
    low = high + 1, high += std::min(turns - high, step);
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (is_after(middle))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// The member of a stripe, and its number there.
std::pair<std::size_t, std::uint64_t> Volume::stripe(std::uint64_t index) const {
  const std::uint64_t at = skipped_ + index;
  for (std::size_t each = 0; each < members_.size(); ++each) {
    const std::uint64_t turn = first_turn(each, at);
    if (turn < members_[each].turns() && turns_before(each, turn) == at)
      return {each, turn - members_[each].skipped};
  }
  INFINITY_CHECK(false, "no member has stripe ", index);
}

void Volume::set_files(const std::vector<int>& files) {
  INFINITY_REQUIRE(!members_.empty() && files.size() == members_.size(), files.size(),
                   " files for a volume of ", members_.size(), " members");
  files_ = files;
}

Volume::Place Volume::place(std::uint64_t at, std::size_t nbytes) const {
  INFINITY_REQUIRE(!files_.empty(), "a transfer of a volume that has no files yet");
  if (members_.size() == 1) return {files_.front(), at, nbytes};
  const std::uint64_t index = at / stripe_nbytes_, inside = at % stripe_nbytes_;
  INFINITY_REQUIRE(index < stripes_, "byte ", at, " of a volume of ", stripes_, " stripes of ",
                   stripe_nbytes_);
  const auto [member, number] = stripe(index);
  return {files_[member], number * stripe_nbytes_ + inside,
          std::min<std::uint64_t>(nbytes, stripe_nbytes_ - inside)};
}

}  // namespace infinity
