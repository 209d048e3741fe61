// Lion (Chen et al. 2023, algorithm 2). exp_avg: the momentum.

template <class V>
struct Lion {
  using F = typename V::F;
  INFINITY_FN Uses uses(const Constants&) { return {true, false}; }
  static void prepare(const Hyperparameters&, Constants&) {}
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay) p = V::mul(p, V::set(k.decay));
    const F direction = V::sign(V::fma(g, V::set(k.one_minus_beta1), V::mul(s.m, V::set(k.beta1))));
    p = V::fma(direction, V::set(k.neg_lr), p);
    s.m = V::fma(g, V::set(k.one_minus_beta2), V::mul(s.m, V::set(k.beta2)));
  }
};
