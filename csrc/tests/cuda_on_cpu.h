// Enough of CUDA to run the GPU's kernels on a processor, for tests: a block's threads are fibers
// of the thread that launches, one block after the other. Compiled with GCC's alignment checks,
// which end the process at what a GPU would refuse. Given to the compiler with -include, before
// anything else.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __launch_bounds__(n)
#define __grid_constant__

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Dim {
  unsigned x;
};
inline thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

// One of a block's threads.
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool over = false;
};

inline thread_local ucontext_t launcher;
inline thread_local Fiber* running = nullptr;
inline thread_local const std::function<void()>* work = nullptr;

// All `count` fibers leave when the last one has come.
class Barrier {
 public:
  explicit Barrier(unsigned count) : count_(count) {}
  void wait() {
    const unsigned round = round_;
    if (++waiting_ == count_) {
      waiting_ = 0, ++round_;
    } else {
      while (round_ == round) swapcontext(&running->context, &launcher);
    }
  }

 private:
  unsigned count_, waiting_ = 0, round_ = 0;
};

// Half a warp: who is reduced together.
struct Warp {
  Barrier barrier{16};
  int values[16];
};

inline thread_local Barrier* block = nullptr;
inline thread_local Warp* warp = nullptr;

inline void enter() {
  (*work)();
  running->over = true;
}

// Runs a block's threads, each until it waits for others, in another order each time: who reads
// what another one writes, without a barrier between them, comes too early in some.
inline void run_block(unsigned threads, const std::function<void()>& kernel) {
  constexpr std::size_t kStackNbytes = 64 * 1024;
  // a fiber that ends leaves its own to the next
  static std::vector<std::unique_ptr<char[]>> stacks;
  static std::minstd_rand drawn;
  Barrier barrier(threads);
  std::vector<Warp> warps(threads / 16);
  std::vector<Fiber> fibers(threads);
  block = &barrier, work = &kernel;
  unsigned left = threads;
  while (left) {
    // odd: it comes to each of a power of two
    const unsigned first = drawn() % threads, stride = drawn() | 1;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = (first + i * stride) % threads;
      running = &fibers[t];
      if (running->over) continue;
      threadIdx = {t}, warp = &warps[t / 16];
      if (!running->stack) {
        if (stacks.empty()) stacks.emplace_back(new char[kStackNbytes]);
        running->stack = std::move(stacks.back());
        stacks.pop_back();
        getcontext(&running->context);
        running->context.uc_stack.ss_sp = running->stack.get();
        running->context.uc_stack.ss_size = kStackNbytes;
        running->context.uc_link = &launcher;
        makecontext(&running->context, enter, 0);
      }
      swapcontext(&launcher, &running->context);
      if (running->over) {
        stacks.push_back(std::move(running->stack));
        --left;
      }
    }
  }
}

inline std::mutex one_at_a_time;  // what a block shares is static

template <class Kernel>
auto launch(Kernel kernel, unsigned blocks, unsigned threads) {
  return [=](auto... arguments) {
    const std::lock_guard lock(one_at_a_time);
    blockDim = {threads}, gridDim = {blocks};
    for (unsigned b = 0; b < blocks; ++b) {
      blockIdx = {b};
      run_block(threads, [=] { kernel(arguments...); });
    }
  };
}

}  // namespace on_cpu

#define INFINITY_LAUNCH(kernel, blocks, threads, stream) on_cpu::launch(kernel, blocks, threads)

inline void __syncthreads() { on_cpu::block->wait(); }

inline int __reduce_max_sync(unsigned mask, int value) {
  if (mask != 0xFFFFu << (threadIdx.x & 16)) std::abort();  // no other is used
  on_cpu::Warp& warp = *on_cpu::warp;
  warp.values[threadIdx.x % 16] = value;
  warp.barrier.wait();
  const int largest = *std::max_element(warp.values, warp.values + 16);
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
// then a grid has 16 blocks at most
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 0; }
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
inline cudaError_t cudaHostAlloc(void** memory, std::size_t nbytes, unsigned) {
  return (*memory = std::malloc(nbytes)) == nullptr;
}
inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = 0;
  return cudaSuccess;
}
