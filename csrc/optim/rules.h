// Every rule, each in a file of its own, and the one that chooses among those that few people use.
//
// A rule is a template over a vector type V:
//
//   uses      which moments it has: exp_avg with either sign, exp_avg_sq without one, and others
//   prepare   hyperparameters -> constants of its own (`Constants::own`), in double as torch does;
//             once for a run
//   step      one step of one vector. p: master, g: gradient, s: its moments

#include "optim/rules/adadelta.h"
#include "optim/rules/adagrad.h"
#include "optim/rules/adam.h"
#include "optim/rules/adamax.h"
#include "optim/rules/adan.h"
#include "optim/rules/ademamix.h"
#include "optim/rules/amsgrad.h"
#include "optim/rules/asgd.h"
#include "optim/rules/lion.h"
#include "optim/rules/nadam.h"
#include "optim/rules/radam.h"
#include "optim/rules/rmsprop.h"
#include "optim/rules/rprop.h"
#include "optim/rules/sgd.h"

// Chooses the rule for each vector. With 8-bit moments the rules that few people use share a
// processor's kernel: one for each would take minutes to compile.
template <class V>
struct Other {
  using F = typename V::F;
#define INFINITY_CASE(Name, NAME) \
  case Rule::k##Name:             \
    return Name<V>::INFINITY_CALL;
#define INFINITY_CALL uses(k)
  INFINITY_FN Uses uses(const Constants& k) {
    switch (k.rule) {
      INFINITY_SELDOM_USED(INFINITY_CASE)
      default:
        return {};
    }
  }
#undef INFINITY_CALL
#define INFINITY_CALL step(p, g, s, k)
  // one function, however many kernels call it
  __attribute__((noinline)) INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    switch (k.rule) {
      INFINITY_SELDOM_USED(INFINITY_CASE)
      default:
        return;
    }
  }
#undef INFINITY_CALL
#undef INFINITY_CASE
};
