// DeviceCalls: what the GPU's module does for threads of the core, which knows nothing of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

// Both return 0, or the device's error.
struct DeviceCalls {
  // Has the calling thread use the device with this number.
  int (*enter)(int device) = nullptr;
  // As crc32c_blocks, of memory on the device, in whole blocks of 4096 bytes. Returns when `sums`, on the host, are there.
  int (*checksums)(const void* data, std::size_t nbytes, std::uint32_t* sums) = nullptr;
};

}  // namespace infinity
