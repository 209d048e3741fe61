// The scalar unit: the formulas compiled over Scalar.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "adam/kernel.h"

namespace infinity::scalar_unit {
namespace {

#include "adam/scalar.h"

using Vector = Scalar;

#include "adam/formula.h"

}  // namespace

Kernel find_kernel(const Layout& layout) { return find(layout); }

}  // namespace infinity::scalar_unit
