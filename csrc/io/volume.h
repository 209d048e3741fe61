// Volume: one range of bytes that lies in several files, in stripes that take turns.
//
//   member   a file, and how many stripes it holds: more where the disk is faster or has more room
//   turn     the member that has the next stripe is the one that is furthest behind its part, so any few stripes in a row lie
//            on all members, in proportion to what they hold
//   skipped  turns passed over before the first stripe, so that ranks that read the same place do not read the same disk
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace infinity {

class Volume {
 public:
  struct Place {
    int file;
    std::uint64_t offset;
    std::size_t nbytes;  // that lie there in a row
  };

  Volume() = default;  // extents may refer to one that is laid out later

  // All of one file.
  static std::shared_ptr<const Volume> of(int file);

  // Lays `nbytes` out over as many members as there are `counts`: stripes of each. Returns the bytes of each; the last stripe
  // may be cut. Throws UsageError where the stripes do not hold `nbytes`, or the volume has files already.
  std::vector<std::uint64_t> lay_out(std::size_t stripe_nbytes, const std::vector<std::uint64_t>& counts, std::uint64_t skipped,
                                     std::uint64_t nbytes);

  // Names the file of each member that has bytes; others may be -1. Nothing is transferred before.
  void set_files(const std::vector<int>& files);

  // The files of all members; none before they are set.
  const std::vector<int>& files() const { return files_; }

  // Where byte `at` lies, and how many of the `nbytes` from there on. Throws UsageError before it has files.
  Place place(std::uint64_t at, std::size_t nbytes) const;

 private:
  struct Stripe {
    std::uint32_t member, index;  // index: of those that the member has
  };

  std::size_t stripe_nbytes_ = 0;
  std::size_t members_ = 0;
  std::vector<Stripe> stripes_;  // none where there is one member
  std::vector<int> files_;
};

}  // namespace infinity
