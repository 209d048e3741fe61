// The neon unit: the formulas compiled over Neon.
#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "optim/kernel.h"

namespace infinity::neon_unit {
namespace {

#include "optim/scalar.h"
#include "optim/neon.h"

using Vector = Neon;

#include "optim/formula.h"

}  // namespace

Kernel find_kernel(const Layout& layout) { return find(layout); }

}  // namespace infinity::neon_unit
