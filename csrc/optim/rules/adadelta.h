// Adadelta (Zeiler 2012), as torch.optim's. exp_avg: the squared updates (acc_delta), exp_avg_sq:
// the squared gradients (square_avg); beta2 is its rho.

template <class V>
struct Adadelta {
  using F = typename V::F;
  INFINITY_FN Uses uses(const Constants&) { return {true, true}; }
  static void prepare(const Hyperparameters&, Constants&) {}
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    const F eps = V::set(k.eps);
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    s.v = with_square<V>(s.v, g, k.beta2, k.one_minus_beta2);
    const F delta = V::mul(V::div(V::sqrt(V::add(s.m, eps)), V::sqrt(V::add(s.v, eps))), g);
    s.m = with_square<V>(s.m, delta, k.beta2, k.one_minus_beta2);
    p = V::fma(delta, V::set(k.neg_lr), p);
  }
};
