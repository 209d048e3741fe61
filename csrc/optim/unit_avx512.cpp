// The avx512 unit: the formulas compiled over Avx512.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "optim/kernel.h"

namespace infinity::avx512_unit {
namespace {

#include "optim/scalar.h"
#include "optim/avx512.h"

using Vector = Avx512;

#include "optim/formula.h"

}  // namespace

Kernel find_kernel(const Layout& layout) { return find(layout); }

}  // namespace infinity::avx512_unit
