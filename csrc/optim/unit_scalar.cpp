// The scalar unit: the formulas compiled over Scalar.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "optim/kernel.h"

namespace infinity::scalar_unit {
namespace {

#include "optim/scalar.h"

using Vector = Scalar;

#include "optim/formula.h"

}  // namespace

Kernel find_kernel(const Layout& layout) { return find(layout); }

}  // namespace infinity::scalar_unit
