// RMSprop (Hinton 2012), with momentum if it is set, as torch.optim's. exp_avg: the momentum
// (momentum_buffer), exp_avg_sq: the squared gradients (square_avg); beta2 is its alpha.

template <class V>
struct RMSprop {
  using F = typename V::F;
  INFINITY_FN bool uses_exp_avg(const Constants& k) { return k.has_momentum; }
  INFINITY_FN bool uses_exp_avg_sq(const Constants&) { return true; }
  static void prepare(const Hyperparameters&, Constants&) {}
  INFINITY_FN void step(F& p, F g, F& m, F& v, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    v = with_square<V>(v, g, k.beta2, k.one_minus_beta2);
    const F root = V::add(V::sqrt(v), V::set(k.eps));
    if (k.has_momentum) {
      m = V::add(V::mul(m, V::set(k.momentum)), V::div(g, root));
      p = V::fma(m, V::set(k.neg_lr), p);
    } else {
      p = V::add(p, V::div(V::mul(V::set(k.neg_lr), g), root));
    }
  }
};
