// Extent: the home of one flat array, in memory or in a file, with a checksum per block and a version.
//
//   version     the step that wrote the bytes; several extents of one array may carry different ones later
//   checksums   of file extents only, one CRC-32C per kChecksumNbytes, kept in memory: what the disk returns is
//               held against what was sent, so a lost, stale, torn or flipped block is met at the next read
#pragma once

#include <cstdint>
#include <vector>

#include "base/span.h"
#include "io/engine.h"

namespace infinity {

class Extent {
 public:
  static Extent in_memory(Span span) {
    Extent extent;
    extent.memory_ = span;
    extent.nbytes_ = span.nbytes;
    return extent;
  }
  // A file extent starts as zeros: what reserved space reads as before its first write.
  static Extent in_file(int file, std::uint64_t offset, std::size_t nbytes);

  bool is_file() const { return file_ >= 0; }
  std::size_t nbytes() const { return nbytes_; }
  int file() const { return file_; }
  std::uint64_t offset() const { return offset_; }
  std::byte* memory() const { return memory_.data; }

  Request request(Op op, std::size_t at, Span span) const;

  // Keeps the checksums of bytes about to be written at `at` (a multiple of kChecksumNbytes).
  void remember(std::size_t at, Span span);
  // Throws CorruptionError when bytes read at `at` are not those last written there.
  void verify(std::size_t at, Span span, const IoEngine& engine) const;

  std::uint64_t version = 0;

 private:
  void check(std::size_t at, std::size_t nbytes) const;

  Span memory_;
  int file_ = -1;
  std::uint64_t offset_ = 0;
  std::size_t nbytes_ = 0;
  std::vector<std::uint32_t> checksums_;
};

}  // namespace infinity
