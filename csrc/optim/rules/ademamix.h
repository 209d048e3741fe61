// AdEMAMix (Pagliardini et al. 2024), as pytorch_optimizer's. moment_3: the slow average
// (exp_avg_slow). Its weight (alpha) and its rate (beta3) in this step come with the
// hyperparameters.

template <class V>
struct AdEMAMix {
  using F = typename V::F;
  static constexpr int kBias1 = 0, kAlpha = 1, kOneMinusBeta3 = 2;
  INFINITY_FN Uses uses(const Constants&) { return {true, true, true}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    AdamW<V>::prepare(h, k);
    if (h.fixed_decay) k.decay = static_cast<float>(1 - h.weight_decay);
    k.own[kBias1] = static_cast<float>(1 - std::pow(h.beta1, double(h.step)));
    k.own[kAlpha] = static_cast<float>(h.alpha);
    k.own[kOneMinusBeta3] = static_cast<float>(1 - h.beta3);
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay && k.decoupled) p = V::mul(p, V::set(k.decay));
    if (k.has_decay && !k.decoupled) g = V::fma(p, V::set(k.weight_decay), g);
    s.m = lerp<V>(s.m, g, k.one_minus_beta1);
    s.v = with_square<V>(s.v, g, k.beta2, k.one_minus_beta2);
    s.third = lerp<V>(s.third, g, k.own[kOneMinusBeta3]);
    const F denominator =
        V::add(quotient<V>(V::sqrt(s.v), k.bias2_sqrt, k.bias2_sqrt_reciprocal), V::set(k.eps));
    const F fast = V::div(s.m, V::set(k.own[kBias1]));
    const F update = V::fma(s.third, V::set(k.own[kAlpha]), fast);
    p = V::add(p, V::div(V::mul(V::set(k.neg_lr), update), denominator));
  }
};
