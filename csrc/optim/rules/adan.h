// Adan (Xie et al. 2022), as pytorch_optimizer's. moment_3: the differences of gradients
// (exp_avg_diff), moment_4: the last gradient with the other sign (previous_grad).

template <class V>
struct Adan {
  using F = typename V::F;
  static constexpr int kOfMean = 0, kOfDifference = 1, kBeta3 = 2, kOneMinusBeta3 = 3, kGrowth = 4;
  INFINITY_FN Uses uses(const Constants&) { return {true, true, true, true}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    const double step = static_cast<double>(h.step);
    k.own[kOfMean] = static_cast<float>(-(h.lr / (1 - std::pow(h.beta1, step))));
    k.own[kOfDifference] = static_cast<float>(-(h.lr * h.beta2 / (1 - std::pow(h.beta2, step))));
    k.own[kBeta3] = static_cast<float>(h.beta3);
    k.own[kOneMinusBeta3] = static_cast<float>(1 - h.beta3);
    k.own[kGrowth] = static_cast<float>(1 + h.lr * h.weight_decay);
    k.bias2_sqrt = static_cast<float>(std::sqrt(1 - std::pow(h.beta3, step)));
    k.bias2_sqrt_reciprocal = 1.0f / k.bias2_sqrt;
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    // The class keeps its first gradient before it turns it round
    if (k.fresh) s.fourth = k.maximize ? g : V::neg(g);
    const F difference = V::add(s.fourth, g);
    s.fourth = V::neg(g);
    s.m = lerp<V>(s.m, g, k.one_minus_beta1);
    s.third = lerp<V>(s.third, difference, k.one_minus_beta2);
    const F ahead = V::add(V::mul(difference, V::set(k.beta2)), g);
    s.v = with_square<V>(s.v, ahead, k.own[kBeta3], k.own[kOneMinusBeta3]);
    const F denominator =
        V::add(quotient<V>(V::sqrt(s.v), k.bias2_sqrt, k.bias2_sqrt_reciprocal), V::set(k.eps));
    if (k.has_decay && k.decoupled) p = V::mul(p, V::set(k.decay));
    p = V::add(p, V::div(V::mul(V::set(k.own[kOfMean]), s.m), denominator));
    p = V::add(p, V::div(V::mul(V::set(k.own[kOfDifference]), s.third), denominator));
    if (k.has_decay && !k.decoupled) p = V::div(p, V::set(k.own[kGrowth]));
  }
};
