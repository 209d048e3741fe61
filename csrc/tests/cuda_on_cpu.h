// Enough of CUDA to run the GPU's kernels on a processor, for tests: each block's threads are real ones, one block after
// the other. Given to the compiler with -include, before anything else.
#pragma once

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __launch_bounds__(n)

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Dim {
  unsigned x;
};
inline thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

// All `count` threads leave when the last one has come.
class Barrier {
 public:
  explicit Barrier(unsigned count) : count_(count) {}
  void wait() {
    std::unique_lock lock(mutex_);
    const unsigned round = round_;
    if (++waiting_ == count_) {
      waiting_ = 0, ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  unsigned count_, waiting_ = 0, round_ = 0;
};

struct Warp {
  Barrier barrier{32};
  int values[32];
};

inline thread_local Barrier* block = nullptr;
inline thread_local Warp* warp = nullptr;

template <class Kernel>
auto launch(Kernel kernel, unsigned blocks, unsigned threads) {
  return [=](auto... arguments) {
    static std::mutex one_at_a_time;  // what a block shares is static
    const std::lock_guard lock(one_at_a_time);
    for (unsigned b = 0; b < blocks; ++b) {
      Barrier barrier(threads);
      std::vector<Warp> warps(threads / 32);
      std::vector<std::thread> running;
      for (unsigned t = 0; t < threads; ++t) {
        running.emplace_back([&, b, t] {
          threadIdx = {t}, blockIdx = {b}, blockDim = {threads}, gridDim = {blocks};
          block = &barrier, warp = &warps[t / 32];
          kernel(arguments...);
        });
      }
      for (std::thread& thread : running) thread.join();
    }
  };
}

}  // namespace on_cpu

#define INFINITY_LAUNCH(kernel, blocks, threads, stream) on_cpu::launch(kernel, blocks, threads)

inline void __syncthreads() { on_cpu::block->wait(); }

inline int __reduce_max_sync(unsigned, int value) {
  on_cpu::Warp& warp = *on_cpu::warp;
  warp.values[threadIdx.x % 32] = value;
  warp.barrier.wait();
  const int largest = *std::max_element(warp.values, warp.values + 32);
  warp.barrier.wait();
  return largest;
}

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
constexpr int cudaDevAttrMultiProcessorCount = 0;
struct cudaDeviceProp {
  char name[8];
  int major, minor, multiProcessorCount;
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 0; }  // then a grid has 16 blocks at most
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"cpu", 0, 0, 1};
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) { return device != 0; }
constexpr unsigned cudaStreamNonBlocking = 1, cudaHostAllocPortable = 1;
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaHostAlloc(void** memory, std::size_t nbytes, unsigned) { return (*memory = std::malloc(nbytes)) == nullptr; }
inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = 0;
  return cudaSuccess;
}
