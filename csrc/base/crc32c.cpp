#include "base/crc32c.h"

#include <array>
#include <cstring>
#include <vector>

#if defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace infinity {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected Castagnoli

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

Tables make_tables() {
  Tables tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][i] = crc;
  }
  for (int t = 1; t < 8; ++t)
    for (std::uint32_t i = 0; i < 256; ++i)
      tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xFF];
  return tables;
}

// Slicing by eight: the definition, and the path of processors without the instruction.
std::uint32_t crc_table(std::uint32_t crc, const unsigned char* bytes, std::size_t nbytes) {
  static const Tables tables = make_tables();
  while (nbytes >= 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes, 8);
    word ^= crc;
    crc = 0;
    for (int t = 0; t < 8; ++t) crc ^= tables[7 - t][(word >> (8 * t)) & 0xFF];
    bytes += 8;
    nbytes -= 8;
  }
  for (; nbytes; --nbytes) crc = (crc >> 8) ^ tables[0][(crc ^ *bytes++) & 0xFF];
  return crc;
}

#if defined(__x86_64__)
#define INFINITY_HAS_CRC 1
#define INFINITY_CRC_TARGET __attribute__((target("sse4.2")))

bool has_instruction() {
  static const bool yes = __builtin_cpu_supports("sse4.2");
  return yes;
}
INFINITY_CRC_TARGET inline std::uint64_t crc_word(std::uint64_t crc, std::uint64_t word) {
  return __builtin_ia32_crc32di(crc, word);
}
INFINITY_CRC_TARGET inline std::uint32_t crc_byte(std::uint32_t crc, unsigned char byte) {
  return __builtin_ia32_crc32qi(crc, byte);
}
#elif defined(__aarch64__)
#define INFINITY_HAS_CRC 1
#define INFINITY_CRC_TARGET __attribute__((target("+crc")))

bool has_instruction() {
  static const bool yes = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
  return yes;
}
INFINITY_CRC_TARGET inline std::uint64_t crc_word(std::uint64_t crc, std::uint64_t word) {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
INFINITY_CRC_TARGET inline std::uint32_t crc_byte(std::uint32_t crc, unsigned char byte) {
  return __crc32cb(crc, byte);
}
#endif

// a * b modulo the polynomial, over GF(2). The coefficient of x^0 is the highest bit.
std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum = 0;
  for (std::uint32_t bit = std::uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if (a & bit) sum ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
  }
  return sum;
}

// x to the power of 8 * `nbytes`: what as many zero bytes multiply a register by.
std::uint32_t zeros(std::size_t nbytes) {
  std::uint32_t power = std::uint32_t{1} << 31;
  for (std::uint32_t square = std::uint32_t{1} << 23; nbytes != 0; nbytes >>= 1) {
    if (nbytes & 1) power = product(power, square);
    square = product(square, square);
  }
  return power;
}

#if defined(INFINITY_HAS_CRC)
INFINITY_CRC_TARGET std::uint32_t crc_instruction(std::uint32_t crc, const unsigned char* bytes,
                                                  std::size_t nbytes) {
  std::uint64_t wide = crc;
  for (; nbytes >= 8; bytes += 8, nbytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes, 8);
    wide = crc_word(wide, word);
  }
  crc = static_cast<std::uint32_t>(wide);
  for (; nbytes; --nbytes) crc = crc_byte(crc, *bytes++);
  return crc;
}

// What a fixed number of zero bytes makes of a register: linear in it, so a table for each of its
// bytes does.
class Zeros {
 public:
  explicit Zeros(std::size_t nbytes) {
    const std::uint32_t power = zeros(nbytes);
    for (std::size_t byte = 0; byte < 4; ++byte)
      for (std::uint32_t value = 0; value < 256; ++value)
        tables_[byte][value] = product(value << 8 * byte, power);
  }
  std::uint32_t after(std::uint32_t crc) const {
    return tables_[0][crc & 0xFF] ^ tables_[1][crc >> 8 & 0xFF] ^ tables_[2][crc >> 16 & 0xFF] ^
           tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_;
};

// One whole block. The instruction has a latency of three cycles and a throughput of one, so three
// parts of the block run in lockstep at three times the speed of one, and are put together by what
// follows each of them.
INFINITY_CRC_TARGET std::uint32_t crc_block(std::uint32_t crc, const unsigned char* bytes) {
  constexpr std::size_t kPart = kChecksumNbytes / 24 * 8;
  static const Zeros one_part(kPart), two_parts(2 * kPart);
  std::uint64_t a = crc, b = 0, c = 0;
  for (std::size_t i = 0; i < kPart; i += 8) {
    std::uint64_t x, y, z;
    std::memcpy(&x, bytes + i, 8);
    std::memcpy(&y, bytes + kPart + i, 8);
    std::memcpy(&z, bytes + 2 * kPart + i, 8);
    a = crc_word(a, x);
    b = crc_word(b, y);
    c = crc_word(c, z);
  }
  const std::uint32_t joined = two_parts.after(static_cast<std::uint32_t>(a)) ^
                               one_part.after(static_cast<std::uint32_t>(b)) ^
                               static_cast<std::uint32_t>(c);
  return crc_instruction(joined, bytes + 3 * kPart, kChecksumNbytes - 3 * kPart);
}
#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t seed) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(INFINITY_HAS_CRC)
  if (has_instruction()) {
    std::uint32_t crc = ~seed;
    for (; nbytes >= kChecksumNbytes; bytes += kChecksumNbytes, nbytes -= kChecksumNbytes)
      crc = crc_block(crc, bytes);
    return ~crc_instruction(crc, bytes, nbytes);
  }
#endif
  return ~crc_table(~seed, bytes, nbytes);
}

std::uint32_t crc32c_before(std::uint32_t sum, std::size_t nbytes) {
  return product(sum, zeros(nbytes));
}

void crc32c_blocks(const void* data, std::size_t nbytes, std::uint32_t* sums) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  while (nbytes) {
    const std::size_t part = nbytes < kChecksumNbytes ? nbytes : kChecksumNbytes;
    *sums++ = crc32c(bytes, part);
    bytes += part;
    nbytes -= part;
  }
}

}  // namespace infinity
