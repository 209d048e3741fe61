// RMSprop (Hinton 2012), with momentum if it is set, as torch.optim's. exp_avg: the momentum
// (momentum_buffer), exp_avg_sq: the squared gradients (square_avg), moment_3: the gradients
// (grad_avg), if it is centred; beta2 is its alpha.

template <class V>
struct RMSprop {
  using F = typename V::F;
  INFINITY_FN Uses uses(const Constants& k) { return {k.has_momentum, true, k.centered}; }
  static void prepare(const Hyperparameters&, Constants&) {}
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    s.v = with_square<V>(s.v, g, k.beta2, k.one_minus_beta2);
    F variance = s.v;
    if (k.centered) {
      s.third = lerp<V>(s.third, g, k.one_minus_beta2);
      variance = V::fma(V::neg(s.third), s.third, s.v);
    }
    const F root = V::add(V::sqrt(variance), V::set(k.eps));
    if (k.has_momentum) {
      s.m = V::add(V::mul(s.m, V::set(k.momentum)), V::div(g, root));
      p = V::fma(s.m, V::set(k.neg_lr), p);
    } else {
      p = V::add(p, V::div(V::mul(V::set(k.neg_lr), g), root));
    }
  }
};
