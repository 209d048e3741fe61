// Adam and AdamW with the largest second moment so far (Reddi et al. 2018), as torch.optim's with
// amsgrad. moment_3: the largest (max_exp_avg_sq); a group without amsgrad has none.

template <class V>
struct AMSGrad {
  using F = typename V::F;
  INFINITY_FN Uses uses(const Constants& k) { return {true, true, k.amsgrad}; }
  static void prepare(const Hyperparameters& h, Constants& k) { AdamW<V>::prepare(h, k); }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay && k.decoupled) p = V::mul(p, V::set(k.decay));
    if (k.has_decay && !k.decoupled) g = V::fma(p, V::set(k.weight_decay), g);
    s.m = lerp<V>(s.m, g, k.one_minus_beta1);
    s.v = with_square<V>(s.v, g, k.beta2, k.one_minus_beta2);
    if (k.amsgrad) s.third = larger<V>(s.third, magnitude<V>(s.v));
    const F root = V::sqrt(k.amsgrad ? s.third : s.v);
    const F denominator =
        V::add(quotient<V>(root, k.bias2_sqrt, k.bias2_sqrt_reciprocal), V::set(k.eps));
    p = V::add(p, V::div(V::mul(V::set(k.neg_step_size), s.m), denominator));
  }
};
