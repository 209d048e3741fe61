// CRC-32C (Castagnoli), the checksum over every block that goes to disk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

// Bytes covered by one checksum. Transfers of part of an extent start at a multiple of it.
constexpr std::size_t kChecksumNbytes = 64 * 1024;

// CRC-32C of `nbytes` at `data`; `seed` continues an earlier call.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t seed = 0);

// What the sum of some bytes adds to that of a whole in which `nbytes` more bytes follow them: the
// sum of a whole is the exclusive or of what its parts add, in any order. crc32c(AB) ==
// crc32c_before(crc32c(A), |B|) ^ crc32c(B).
std::uint32_t crc32c_before(std::uint32_t sum, std::size_t nbytes);

// One checksum per kChecksumNbytes of `data` (the last may cover less) into `sums`.
void crc32c_blocks(const void* data, std::size_t nbytes, std::uint32_t* sums);

constexpr std::size_t checksum_count(std::size_t nbytes) {
  return (nbytes + kChecksumNbytes - 1) / kChecksumNbytes;
}

}  // namespace infinity
