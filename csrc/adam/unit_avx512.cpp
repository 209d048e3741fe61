// The avx512 unit: the formulas compiled over Avx512.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "adam/kernel.h"

namespace infinity::avx512_unit {
namespace {

#include "adam/scalar.h"
#include "adam/avx512.h"

using Vector = Avx512;

#include "adam/formula.h"

}  // namespace

Kernel find_kernel(const Layout& layout) { return find(layout); }

}  // namespace infinity::avx512_unit
