// CRC-32C by pieces: the checksum of bytes that several threads have each a part of, on a processor
// or a GPU.
//
//   remainder   of a polynomial over GF(2), modulo Castagnoli's: 32 bits, reflected (bit 31 is the
//   coefficient of 1) register    what runs through a CRC: linear in the bytes. `~register` after
//   all bytes, from ~0 before them, is the checksum
//
// A byte behind multiplies what is in front of it by x^8. So the register of two pieces is that of
// the first, times x^8 for each byte of the second, plus (that is, XOR) that of the second.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define INFINITY_BOTH __host__ __device__
#else
#define INFINITY_BOTH
#endif

namespace infinity::pieces {

constexpr std::uint32_t kPolynomial = 0x82F63B78;
constexpr std::uint32_t kOne = 0x80000000;
constexpr std::uint32_t kByte = 0x00800000;  // x^8

// The product of two remainders.
INFINITY_BOTH constexpr std::uint32_t times(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);  // times x
  }
  return product;
}

// What `count` bytes behind multiply by: x^(8 count).
INFINITY_BOTH constexpr std::uint32_t behind(std::size_t count) {
  std::uint32_t power = kOne;
  for (std::uint32_t square = kByte; count != 0; count >>= 1) {
    if (count & 1) power = times(power, square);
    square = times(square, square);
  }
  return power;
}

// The register that `count` zero bytes make of `value`.
INFINITY_BOTH constexpr std::uint32_t moved(std::uint32_t value, std::size_t count) {
  return times(behind(count), value);
}

}  // namespace infinity::pieces
