// Hyperparameters -> the constants of the formula, for every unit.
#include <algorithm>
#include <cmath>

#include <cstring>

#include "base/check.h"
#include "optim/kernel.h"

namespace infinity {
namespace {

#include "optim/scalar.h"

#include "optim/arithmetic.h"
#include "optim/rules.h"

}  // namespace

Constants prepare(Rule rule, const Hyperparameters& h) {
  INFINITY_REQUIRE(h.step >= 1, "optimizer steps count from 1, not ", h.step);
  INFINITY_REQUIRE(h.grad_factors.size() <= kMaxGradFactors, "at most ", kMaxGradFactors,
                   " gradient factors");
  Constants k{};
  k.decay = static_cast<float>(1 - h.lr * h.weight_decay);
  k.weight_decay = static_cast<float>(h.weight_decay);
  k.has_decay = h.weight_decay != 0;
  k.beta1 = static_cast<float>(h.beta1);
  k.beta2 = static_cast<float>(h.beta2);
  k.one_minus_beta1 = static_cast<float>(1 - h.beta1);
  k.one_minus_beta2 = static_cast<float>(1 - h.beta2);
  k.eps = static_cast<float>(h.eps);
  k.momentum = static_cast<float>(h.momentum);
  k.one_minus_dampening = static_cast<float>(1 - h.dampening);
  k.has_momentum = h.momentum != 0;
  k.nesterov = h.nesterov;
  k.neg_lr = static_cast<float>(-h.lr);
  k.first = h.step == 1;
  k.fresh = h.fresh;
  k.maximize = h.maximize;
  k.decoupled = h.decoupled;
  k.amsgrad = h.amsgrad;
  k.centered = h.centered;
  k.rule = rule;
  switch (rule) {
#define INFINITY_CASE(Name, NAME) \
  case Rule::k##Name:             \
    Name<Scalar>::prepare(h, k);  \
    break;
    INFINITY_OFTEN_USED(INFINITY_CASE)
    INFINITY_SELDOM_USED(INFINITY_CASE)
#undef INFINITY_CASE
  }
  k.salt = static_cast<std::uint32_t>(h.step) * 0x9E3779B9u;
  k.factor_count = static_cast<int>(h.grad_factors.size());
  std::copy(h.grad_factors.begin(), h.grad_factors.end(), k.factors);
  return k;
}

}  // namespace infinity
