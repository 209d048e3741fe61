// The avx2 unit: the formulas compiled over Avx2.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "optim/kernel.h"

namespace infinity::avx2_unit {
namespace {

#include "optim/scalar.h"
#include "optim/avx2.h"

using Vector = Avx2;

#include "optim/formula.h"

}  // namespace

Kernel find_kernel(const Layout& layout) { return find(layout); }

}  // namespace infinity::avx2_unit
