// Adadelta (Zeiler 2012), as torch.optim's. exp_avg: the squared updates (acc_delta), exp_avg_sq:
// the squared gradients (square_avg); beta2 is its rho.

template <class V>
struct Adadelta {
  using F = typename V::F;
  INFINITY_FN bool uses_exp_avg(const Constants&) { return true; }
  INFINITY_FN bool uses_exp_avg_sq(const Constants&) { return true; }
  static void prepare(const Hyperparameters&, Constants&) {}
  INFINITY_FN void step(F& p, F g, F& m, F& v, const Constants& k) {
    const F eps = V::set(k.eps);
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    v = with_square<V>(v, g, k.beta2, k.one_minus_beta2);
    const F delta = product<V>(V::div(V::sqrt(V::add(m, eps)), V::sqrt(V::add(v, eps))), g);
    m = with_square<V>(m, delta, k.beta2, k.one_minus_beta2);
    p = V::fma(delta, V::set(k.neg_lr), p);
  }
};
