// The optimizer's formulas compiled for the GPU: the same source as the processor's units, without
// contraction of multiplications and additions (-fmad=false) and with IEEE division and square
// root, so that the bits are the same.
//
// The build compiles it once for each rule (INFINITY_UNIT), all at once. A driver loads such a unit
// when its rule is first used, and then compiles that rule alone where there is only PTX.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "cuda/kernels.h"

namespace infinity::cuda {
namespace {

thread_local cudaStream_t stream = nullptr;  // of the step that is being launched

std::size_t most_blocks() {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return std::size_t{16} * (processors > 0 ? processors : 1);
}

#include "optim/scalar.h"

#include "cuda/quad.h"

using Vector = Quad;

#define INFINITY_OWN_LOOPS "cuda/loops.h"
#include "optim/formula.h"

}  // namespace

template <Rule rule>
void step_by(const Layout& layout, const Arrays& arrays, const std::vector<Run>& runs, void* on) {
  const Kernel kernel = find(layout);
  INFINITY_REQUIRE(kernel, "no GPU kernel for this layout (rule ", int(layout.rule), ", weight ",
                   int(layout.weight), ", master ", int(layout.master), ", gradient ",
                   int(layout.grad), ", moments ", int(layout.moments), ")");
  stream = static_cast<cudaStream_t>(on);
  for (const Run& run : runs) {
    const Constants constants = prepare(layout.rule, run.hyper);
    const Uses uses = kernel.uses(constants);
#define INFINITY_REQUIRE_ARRAY(name, role, of_state)                     \
  INFINITY_REQUIRE(!uses.name || arrays.name, "rule ", int(layout.rule), \
                   " needs an array for each of its moments");
    INFINITY_MOMENTS(INFINITY_REQUIRE_ARRAY)
#undef INFINITY_REQUIRE_ARRAY
    INFINITY_REQUIRE(layout.moments != DType::kInt8 || uses.has_scales(), "rule ", int(layout.rule),
                     " with a third moment has none in 8 bits");
    kernel.step(arrays, run.begin, run.end, constants);
    const cudaError_t error = cudaGetLastError();
    INFINITY_CHECK(error == cudaSuccess,
                   "the step's kernel did not start: ", cudaGetErrorString(error));
  }
}

#define INFINITY_INSTANTIATE(rule) \
  template void step_by<rule>(const Layout&, const Arrays&, const std::vector<Run>&, void*);
#ifdef INFINITY_UNIT
INFINITY_INSTANTIATE(Rule::INFINITY_UNIT)
#else
#define INFINITY_EACH(Name, NAME) INFINITY_INSTANTIATE(Rule::k##Name)
INFINITY_OFTEN_USED(INFINITY_EACH)
INFINITY_SELDOM_USED(INFINITY_EACH)
#endif

}  // namespace infinity::cuda
