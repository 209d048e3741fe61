// SGD, with momentum (Sutskever et al. 2013) if it is set, as torch.optim's. exp_avg: the momentum.

template <class V>
struct Sgd {
  using F = typename V::F;
  INFINITY_FN Uses uses(const Constants& k) { return {k.has_momentum, false}; }
  static void prepare(const Hyperparameters&, Constants&) {}
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    if (k.has_momentum) {
      s.m = k.first ? g : V::fma(g, V::set(k.one_minus_dampening), V::mul(s.m, V::set(k.momentum)));
      g = k.nesterov ? V::fma(s.m, V::set(k.momentum), g) : s.m;
    }
    p = V::fma(g, V::set(k.neg_lr), p);
  }
};
