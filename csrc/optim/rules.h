// Every rule, each in a file of its own, and the one that chooses among those that few people use.
//
// A rule is a template over a vector type V:
//
//   uses_exp_avg, uses_exp_avg_sq    whether it has a first and a second moment, of either sign and
//                                    without one
//   prepare                          hyperparameters -> constants of its own (`Constants::own`), in
//                                    double as torch does; once for a run
//   step                             one step of one vector. p: master, g: gradient, m: exp_avg,
//                                    v: exp_avg_sq

#include "optim/rules/adadelta.h"
#include "optim/rules/adagrad.h"
#include "optim/rules/adam.h"
#include "optim/rules/adamax.h"
#include "optim/rules/lion.h"
#include "optim/rules/radam.h"
#include "optim/rules/rmsprop.h"
#include "optim/rules/rprop.h"
#include "optim/rules/sgd.h"

// Calls the rule for each vector. A kernel of each format is made for this one, and not for each
// rule: they would be many.
template <class V>
struct Other {
  using F = typename V::F;
#define INFINITY_CASE(Name, NAME) \
  case Rule::k##Name:             \
    return Name<V>::INFINITY_CALL;
#define INFINITY_CALL uses_exp_avg(k)
  INFINITY_FN bool uses_exp_avg(const Constants& k) {
    switch (k.rule) {
      INFINITY_SELDOM_USED(INFINITY_CASE)
      default:
        return false;
    }
  }
#undef INFINITY_CALL
#define INFINITY_CALL uses_exp_avg_sq(k)
  INFINITY_FN bool uses_exp_avg_sq(const Constants& k) {
    switch (k.rule) {
      INFINITY_SELDOM_USED(INFINITY_CASE)
      default:
        return false;
    }
  }
#undef INFINITY_CALL
#define INFINITY_CALL step(p, g, m, v, k)
  INFINITY_FN INFINITY_APART void step(F& p, F g, F& m, F& v, const Constants& k) {
    switch (k.rule) {
      INFINITY_SELDOM_USED(INFINITY_CASE)
      default:
        return;
    }
  }
#undef INFINITY_CALL
#undef INFINITY_CASE
};
