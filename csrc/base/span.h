// Span: an address and a length in bytes. Alignment helpers for O_DIRECT.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

// O_DIRECT wants addresses, offsets and lengths in multiples of the logical block; 4096 serves
// every disk.
constexpr std::size_t kBlockNbytes = 4096;

struct Span {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
};

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr std::size_t round_down(std::size_t value, std::size_t multiple) {
  return value / multiple * multiple;
}

inline bool is_aligned(const void* address, std::size_t multiple) {
  return reinterpret_cast<std::uintptr_t>(address) % multiple == 0;
}

}  // namespace infinity
