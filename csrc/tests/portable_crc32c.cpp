// The checksum as a processor without the instruction computes it: the same file, compiled as for
// one of those.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#undef __x86_64__
#undef __aarch64__
#define infinity portable
#include "base/crc32c.cpp"
