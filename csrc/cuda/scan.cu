// Cast, sum of squares and finite check of a flat gradient, in one pass.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "cuda/kernels.h"

namespace infinity::cuda {
namespace {

#include "optim/scalar.h"

#include "cuda/quad.h"

constexpr int kThreads = 256;
// elements of one block: the sums' order does not depend on the grid
constexpr std::size_t kChunk = 64 * 1024;

struct Float32 {
  using T = float;
  template <class V>
  __device__ static typename V::F load(const T* p) {
    return V::load_f32(p);
  }
  template <class V>
  __device__ static void store(T* p, typename V::F x) {
    V::store_f32(p, x);
  }
};
struct BFloat16 {
  using T = std::uint16_t;
  template <class V>
  __device__ static typename V::F load(const T* p) {
    return V::load_bf16(p);
  }
  template <class V>
  __device__ static void store(T* p, typename V::F x) {
    V::store_bf16(p, x);
  }
};
struct Float16 {
  using T = std::uint16_t;
  template <class V>
  __device__ static typename V::F load(const T* p) {
    return V::load_f16(p);
  }
  template <class V>
  __device__ static void store(T* p, typename V::F x) {
    V::store_f16(p, x);
  }
};

// The sum of one value per thread, in a tree; of thread 0.
__device__ double block_sum(double value) {
  __shared__ double sums[kThreads];
  __syncthreads();  // of an earlier sum, whose readers may not be done
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    scan_chunks(const typename In::T* grad, typename Out::T* out, std::size_t count, double* sums,
                float* not_finite) {
  const std::size_t begin = blockIdx.x * kChunk,
                    end = begin + kChunk < count ? begin + kChunk : count;
  double sum = 0;
  bool finite = true;
  auto take = [&](float x) {
    sum += double{x} * double{x};
    finite &= (Scalar::bits(x) & 0x7F800000u) != 0x7F800000u;
  };
  const std::size_t quads = (end - begin) / 4;
  for (std::size_t q = threadIdx.x; q < quads; q += kThreads) {
    const Quad::F x = In::template load<Quad>(grad + begin + 4 * q);
    for (float each : x.x) take(each);
    if (out) Out::template store<Quad>(out + begin + 4 * q, x);
  }
  for (std::size_t i = begin + 4 * quads + threadIdx.x; i < end; i += kThreads) {
    const float x = In::template load<Scalar>(grad + i);
    take(x);
    if (out) Out::template store<Scalar>(out + i, x);
  }
  if (!finite) *not_finite = 1.0f;  // everyone who writes writes the same
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    add_up(const double* sums, std::size_t count, double* sum) {
  double mine = 0;
  for (std::size_t i = threadIdx.x; i < count; i += kThreads) mine += sums[i];
  mine = block_sum(mine);
  if (threadIdx.x == 0) *sum = mine;
}

template <class In, class Out>
void launch(const void* grad, void* out, std::size_t count, double* sum, float* not_finite,
            double* sums, cudaStream_t on) {
  const std::size_t chunks = (count + kChunk - 1) / kChunk;
  const auto kernel = scan_chunks<In, Out>;
  INFINITY_LAUNCH(kernel, static_cast<unsigned>(chunks), kThreads, on)
  (static_cast<const typename In::T*>(grad), static_cast<typename Out::T*>(out), count, sums,
   not_finite);
  INFINITY_LAUNCH(add_up, 1, kThreads, on)(sums, chunks, sum);
}

template <class In>
auto launcher(DType out) {
  switch (out) {
    case DType::kFloat32:
      return launch<In, Float32>;
    case DType::kBFloat16:
      return launch<In, BFloat16>;
    case DType::kFloat16:
      return launch<In, Float16>;
    default:
      throw UsageError("a gradient is cast to fp32, bf16 or fp16");
  }
}

}  // namespace

std::size_t scan_workspace_nbytes(std::size_t count) {
  return (count + kChunk - 1) / kChunk * sizeof(double);
}

void scan(const void* grad, DType grad_dtype, void* out, DType out_dtype, std::size_t count,
          double* sum, float* not_finite, void* workspace, void* stream) {
  INFINITY_REQUIRE(count > 0, "a gradient without elements has nothing to scan");
  auto start = grad_dtype == DType::kFloat32    ? launcher<Float32>(out_dtype)
               : grad_dtype == DType::kBFloat16 ? launcher<BFloat16>(out_dtype)
               : grad_dtype == DType::kFloat16
                   ? launcher<Float16>(out_dtype)
                   : throw UsageError("a gradient is fp32, bf16 or fp16");
  start(grad, out, count, sum, not_finite, static_cast<double*>(workspace),
        static_cast<cudaStream_t>(stream));
  const cudaError_t error = cudaGetLastError();
  INFINITY_CHECK(error == cudaSuccess,
                 "the scan's kernel did not start: ", cudaGetErrorString(error));
}

Device device(std::string* refusal) {
  Device found;
  int number = 0;
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDevice(&number);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, number);
  if (error == cudaSuccess) error = cudaMemGetInfo(&found.free_nbytes, &found.total_nbytes);
  if (error != cudaSuccess) {
    cudaGetLastError();  // it is told here, not at the next launch
    *refusal = cudaGetErrorString(error);
    return found;
  }
  found.name = properties.name;
  found.major = properties.major, found.minor = properties.minor;
  found.processors = properties.multiProcessorCount;
  return found;
}

}  // namespace infinity::cuda
