// SGD, with momentum (Sutskever et al. 2013) if it is set, as torch.optim's. exp_avg: the momentum.

template <class V>
struct Sgd {
  using F = typename V::F;
  INFINITY_FN bool uses_exp_avg(const Constants& k) { return k.has_momentum; }
  INFINITY_FN bool uses_exp_avg_sq(const Constants&) { return false; }
  static void prepare(const Hyperparameters&, Constants&) {}
  INFINITY_FN void step(F& p, F g, F& m, F&, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    if (k.has_momentum) {
      m = k.first ? g : V::fma(g, V::set(k.one_minus_dampening), V::mul(m, V::set(k.momentum)));
      g = k.nesterov ? V::fma(m, V::set(k.momentum), g) : m;
    }
    p = V::fma(g, V::set(k.neg_lr), p);
  }
};
