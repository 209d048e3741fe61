// DeviceCalls: what the GPU's module, or its driver alone, does for threads of the core, which
// knows nothing of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

// All return 0, or the device's error.
struct DeviceCalls {
  // Has the calling thread use the device with this number.
  int (*enter)(int device) = nullptr;
  // As crc32c_blocks, of memory on the device, in whole blocks of 4096 bytes. Returns when `sums`,
  // on the host, are there.
  int (*checksums)(const void* data, std::size_t nbytes, std::uint32_t* sums) = nullptr;
  // Copies memory on the device that the thread uses to any of the host's. Returns when it is
  // there. Needed only without `checksums`.
  int (*copy_out)(void* host, const void* data, std::size_t nbytes) = nullptr;
};

// What CUDA's driver can do without the GPU's module: it takes no checksums. Null where there is no
// driver.
const DeviceCalls* driver_calls();

}  // namespace infinity
