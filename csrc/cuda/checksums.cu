// Checksums of bytes that came from a disk into the device's memory: those of base/crc32c.h.
#include <cstdint>

#include "base/crc32c.h"
#include "base/crc32c_pieces.h"
#include "cuda/kernels.h"

namespace infinity::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWordNbytes = 4;
constexpr std::size_t kMostSums = 4096;  // of one launch

// Entry `i` of four tables: what the byte `i` makes of an empty register, with up to three zero
// bytes behind it.
__device__ std::uint32_t table_entry(std::uint32_t i, int behind) {
  for (int bit = 0; bit < 8 * (behind + 1); ++bit) i = (i >> 1) ^ (i & 1 ? pieces::kPolynomial : 0);
  return i;
}

// A block of threads for each checksum, and of its bytes an equal piece for each thread.
__global__ void __launch_bounds__(kThreads)
    sum_blocks(const std::uint32_t* words, std::size_t nbytes, std::uint32_t* sums) {
  __shared__ std::uint32_t tables[4][256], parts[kThreads];
  const unsigned t = threadIdx.x;
  for (int behind = 0; behind < 4; ++behind) tables[behind][t] = table_entry(t, behind);
  __syncthreads();
  const std::size_t begin = blockIdx.x * kChecksumNbytes;
  const std::size_t count = nbytes - begin < kChecksumNbytes ? nbytes - begin : kChecksumNbytes;
  const std::size_t piece = count / kThreads;  // of whole blocks of the disk: whole words
  std::uint32_t value = t == 0 ? 0xFFFFFFFF : 0;
  const std::uint32_t* mine = words + (begin + t * piece) / kWordNbytes;
  for (std::size_t i = 0; i < piece / kWordNbytes; ++i) {
    value ^= mine[i];
    value = tables[3][value & 0xFF] ^ tables[2][value >> 8 & 0xFF] ^ tables[1][value >> 16 & 0xFF] ^
            tables[0][value >> 24];
  }
  parts[t] = pieces::moved(value, (kThreads - 1 - t) * piece);
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) parts[t] ^= parts[t + half];
  }
  if (t == 0) sums[blockIdx.x] = ~parts[0];
}

// Of one thread: a stream beside all others, and memory that both sides reach.
struct Lane {
  cudaStream_t stream = nullptr;
  std::uint32_t* sums = nullptr;
  cudaError_t open() {
    if (sums) return cudaSuccess;
    if (const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))
      return error;
    return cudaHostAlloc(reinterpret_cast<void**>(&sums), kMostSums * sizeof *sums,
                         cudaHostAllocPortable);
  }
  ~Lane() {  // of no account where the driver has gone
    if (sums) cudaFreeHost(sums);
    if (stream) cudaStreamDestroy(stream);
  }
};

int enter(int device) { return cudaSetDevice(device); }

int checksums(const void* data, std::size_t nbytes, std::uint32_t* sums) {
  thread_local Lane lane;
  if (const cudaError_t error = lane.open()) return error;
  const auto* bytes = static_cast<const std::byte*>(data);
  while (nbytes) {
    const std::size_t part =
        nbytes < kMostSums * kChecksumNbytes ? nbytes : kMostSums * kChecksumNbytes;
    const std::size_t count = checksum_count(part);
    INFINITY_LAUNCH(sum_blocks, static_cast<unsigned>(count), kThreads, lane.stream)
    (reinterpret_cast<const std::uint32_t*>(bytes), part, lane.sums);
    if (const cudaError_t error = cudaGetLastError()) return error;
    if (const cudaError_t error = cudaStreamSynchronize(lane.stream)) return error;
    for (std::size_t i = 0; i < count; ++i) sums[i] = lane.sums[i];
    bytes += part;
    sums += count;
    nbytes -= part;
  }
  return cudaSuccess;
}

constexpr DeviceCalls kCalls{&enter, &checksums};

}  // namespace

const DeviceCalls& calls() { return kCalls; }

}  // namespace infinity::cuda
