// Hyperparameters -> the constants of the formula, for every unit.
#include <algorithm>
#include <cmath>

#include "optim/kernel.h"
#include "base/check.h"

namespace infinity {

Constants prepare(Rule rule, const Hyperparameters& h) {
  INFINITY_REQUIRE(h.step >= 1, "optimizer steps count from 1, not ", h.step);
  INFINITY_REQUIRE(h.grad_factors.size() <= kMaxGradFactors, "at most ", kMaxGradFactors,
                   " gradient factors");
  const double step = static_cast<double>(h.step);
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
  k.maximize = h.maximize;
  if (rule == Rule::kAdamW || rule == Rule::kAdam) {
    k.neg_step_size = static_cast<float>(-(h.lr / (1 - std::pow(h.beta1, step))));
    k.bias2_sqrt = static_cast<float>(std::sqrt(1 - std::pow(h.beta2, step)));
    k.bias2_sqrt_reciprocal = 1.0f / k.bias2_sqrt;
  }
  k.salt = static_cast<std::uint32_t>(h.step) * 0x9E3779B9u;
  k.factor_count = static_cast<int>(h.grad_factors.size());
  std::copy(h.grad_factors.begin(), h.grad_factors.end(), k.factors);
  return k;
}

}  // namespace infinity
