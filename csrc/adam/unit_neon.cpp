// The neon unit: the formulas compiled over Neon.
#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "adam/kernel.h"

namespace infinity::neon_unit {
namespace {

#include "adam/scalar.h"
#include "adam/neon.h"

using Vector = Neon;

#include "adam/formula.h"

}  // namespace

Kernel find_kernel(const Layout& layout) { return find(layout); }

}  // namespace infinity::neon_unit
