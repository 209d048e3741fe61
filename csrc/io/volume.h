// Volume: one range of bytes that is spread over several files, in stripes that take turns.
//
//   member   a file, and the number of stripes it holds: more if the disk is faster or has more
//            room
//   turn     the next stripe goes to the member that is furthest behind its share, so any few
//            consecutive stripes are on all members, in proportion to what they hold
//   skipped  turns that are passed over before the first stripe, so that ranks that read the same
//            place read different disks
//   time     of a turn: the middle of its part, were each member to hand its stripes out evenly
//   over
//            the same time. Turns are ordered by it, so a stripe's place is computed, not kept
//
// Thread safety: `lay_out` and `set_files` are called once each, before any other thread has the
// volume. After that it does not change, and every const function is safe on any thread. There is
// no mutex.
// Ownership: extents share a volume. It has indices of files; the IoEngine owns the files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace infinity {

class Volume {
 public:
  struct Place {
    int file;
    std::uint64_t offset;
    std::size_t nbytes;  // contiguous in the file
  };

  Volume() = default;  // extents may refer to a volume that is laid out later

  // The volume that is all of one file.
  static std::shared_ptr<const Volume> of(int file);

  // Lays `nbytes` out over one member for each of `counts`, its number of stripes. Returns the
  // bytes of each member; the last stripe may be shorter. Throws UsageError if the stripes do not
  // hold `nbytes`, or if the volume was laid out before.
  std::vector<std::uint64_t> lay_out(std::size_t stripe_nbytes,
                                     const std::vector<std::uint64_t>& counts,
                                     std::uint64_t skipped, std::uint64_t nbytes);

  // Sets the file of each member; -1 for a member without bytes. Precondition of every transfer.
  void set_files(const std::vector<int>& files);

  // The files of all members; empty before `set_files`.
  const std::vector<int>& files() const { return files_; }

  // The place of byte `at`, and how many of the next `nbytes` are contiguous there. Throws
  // UsageError before `set_files`.
  Place place(std::uint64_t at, std::size_t nbytes) const;

 private:
  struct Member {
    std::uint64_t count;  // stripes that it holds
    std::uint64_t skipped;  // of its turns
    std::uint64_t turns() const { return skipped + count; }
  };

  std::uint64_t turns_before(std::size_t member, std::uint64_t turn) const;
  std::uint64_t first_turn(std::size_t member, std::uint64_t at) const;
  std::pair<std::size_t, std::uint64_t> stripe(std::uint64_t index) const;

  std::size_t stripe_nbytes_ = 0;
  std::uint64_t skipped_ = 0, stripes_ = 0, all_ = 0;  // all_: stripes that the members hold
  std::vector<Member> members_;
  std::vector<int> files_;
};

}  // namespace infinity
