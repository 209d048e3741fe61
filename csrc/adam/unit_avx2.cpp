// The avx2 unit: the formulas compiled over Avx2.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "adam/kernel.h"

namespace infinity::avx2_unit {
namespace {

#include "adam/scalar.h"
#include "adam/avx2.h"

using Vector = Avx2;

#include "adam/formula.h"

}  // namespace

Kernel find_kernel(const Layout& layout) { return find(layout); }

}  // namespace infinity::avx2_unit
