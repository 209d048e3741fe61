// Finds the unit of a step's rule.
#include "cuda/kernels.h"

namespace infinity::cuda {

void step(const Layout& layout, const Arrays& arrays, const std::vector<Run>& runs, void* stream) {
  switch (layout.rule) {
#define INFINITY_CASE(Name, NAME) \
  case Rule::k##Name:             \
    return step_by<Rule::k##Name>(layout, arrays, runs, stream);
    INFINITY_OFTEN_USED(INFINITY_CASE)
    INFINITY_SELDOM_USED(INFINITY_CASE)
#undef INFINITY_CASE
  }
}

}  // namespace infinity::cuda
