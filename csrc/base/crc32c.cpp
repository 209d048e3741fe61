#include "base/crc32c.h"

#include <array>
#include <cstring>
#include <vector>

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
bool has_instruction() {
  static const bool yes = __builtin_cpu_supports("sse4.2");
  return yes;
}

__attribute__((target("sse4.2"))) std::uint32_t crc_instruction(std::uint32_t crc, const unsigned char* bytes,
                                                                 std::size_t nbytes) {
  std::uint64_t wide = crc;
  for (; nbytes >= 8; bytes += 8, nbytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  crc = static_cast<std::uint32_t>(wide);
  for (; nbytes; --nbytes) crc = __builtin_ia32_crc32qi(crc, *bytes++);
  return crc;
}

// What `count` zero bytes make of a register: linear in the register, so a table for each of its bytes does.
class Zeros {
 public:
  explicit Zeros(std::size_t count) {
    const std::vector<unsigned char> zeros(count);
    for (int bit = 0; bit < 32; ++bit) {
      const std::uint32_t image = crc_instruction(std::uint32_t{1} << bit, zeros.data(), count);
      for (std::size_t value = 0; value < 256; ++value)
        if (value >> (bit % 8) & 1) tables_[bit / 8][value] ^= image;
    }
  }
  std::uint32_t after(std::uint32_t crc) const {
    return tables_[0][crc & 0xFF] ^ tables_[1][crc >> 8 & 0xFF] ^ tables_[2][crc >> 16 & 0xFF] ^ tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_{};
};

// One whole block. The instruction has a latency of three cycles and a throughput of one, so three parts of the block
// run in lockstep at three times the speed of one, and are put together by what follows each of them.
__attribute__((target("sse4.2"))) std::uint32_t crc_block(const unsigned char* bytes) {
  constexpr std::size_t kPart = kChecksumNbytes / 24 * 8;
  static const Zeros one_part(kPart), two_parts(2 * kPart);
  std::uint64_t a = 0xFFFFFFFF, b = 0, c = 0;
  for (std::size_t i = 0; i < kPart; i += 8) {
    std::uint64_t x, y, z;
    std::memcpy(&x, bytes + i, 8);
    std::memcpy(&y, bytes + kPart + i, 8);
    std::memcpy(&z, bytes + 2 * kPart + i, 8);
    a = __builtin_ia32_crc32di(a, x);
    b = __builtin_ia32_crc32di(b, y);
    c = __builtin_ia32_crc32di(c, z);
  }
  const std::uint32_t joined = two_parts.after(static_cast<std::uint32_t>(a)) ^
                               one_part.after(static_cast<std::uint32_t>(b)) ^ static_cast<std::uint32_t>(c);
  return ~crc_instruction(joined, bytes + 3 * kPart, kChecksumNbytes - 3 * kPart);
}
#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t seed) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  if (has_instruction()) return ~crc_instruction(~seed, bytes, nbytes);
#endif
  return ~crc_table(~seed, bytes, nbytes);
}

void crc32c_blocks(const void* data, std::size_t nbytes, std::uint32_t* sums) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  if (has_instruction()) {
    for (; nbytes >= kChecksumNbytes; nbytes -= kChecksumNbytes, bytes += kChecksumNbytes) *sums++ = crc_block(bytes);
  }
#endif
  while (nbytes) {
    const std::size_t part = nbytes < kChecksumNbytes ? nbytes : kChecksumNbytes;
    *sums++ = crc32c(bytes, part);
    bytes += part;
    nbytes -= part;
  }
}

}  // namespace infinity
