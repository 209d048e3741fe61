// The GPU's kernels. All are asynchronous on `stream` (a cudaStream_t; null is the legacy default
// stream) of the current device; addresses are the device's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "io/device_calls.h"
#include "optim/kernel.h"

// Tests define it anew: a processor then runs a grid's threads one after the other.
#ifndef INFINITY_LAUNCH
#define INFINITY_LAUNCH(kernel, blocks, threads, stream) kernel<<<blocks, threads, 0, stream>>>
#endif

namespace infinity::cuda {

// One optimizer step of flat arrays: bits equal to the processor's kernels. Throws UsageError for a
// layout without one.
void step(const Layout& layout, const Arrays& arrays, const std::vector<Run>& runs, void* stream);

// That of a layout with this rule: each is a unit of its own.
template <Rule rule>
void step_by(const Layout& layout, const Arrays& arrays, const std::vector<Run>& runs,
             void* stream);

// One pass over a flat gradient: `out` (null: none) becomes its values in `out_dtype`, rounded as
// torch casts; `sum` gets the sum of their squares in fp64, and `not_finite` is set to 1 where one
// is infinite or not a number (else left alone). The sum is taken in an order that depends on
// `count` alone. `workspace`: scan_workspace_nbytes(count) bytes.
void scan(const void* grad, DType grad_dtype, void* out, DType out_dtype, std::size_t count,
          double* sum, float* not_finite, void* workspace, void* stream);
std::size_t scan_workspace_nbytes(std::size_t count);

// What threads of a direct reader call.
const DeviceCalls& calls();

// Of the current device; empty where there is none, with the reason in `refusal`.
struct Device {
  std::string name;
  int major = 0, minor = 0, processors = 0;
  std::size_t total_nbytes = 0, free_nbytes = 0;
};
Device device(std::string* refusal);

}  // namespace infinity::cuda
