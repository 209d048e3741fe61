// Adamax (Kingma and Ba 2015, algorithm 2), as torch.optim's. exp_avg_sq: the infinity norm
// (exp_inf).

template <class V>
struct Adamax {
  using F = typename V::F;
  static constexpr int kStepSize = 0;
  INFINITY_FN bool uses_exp_avg(const Constants&) { return true; }
  INFINITY_FN bool uses_exp_avg_sq(const Constants&) { return true; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    k.own[kStepSize] = static_cast<float>(-(h.lr / (1 - std::pow(h.beta1, double(h.step)))));
  }
  INFINITY_FN void step(F& p, F g, F& m, F& v, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    m = lerp<V>(m, g, k.one_minus_beta1);
    v = larger<V>(V::mul(v, V::set(k.beta2)), V::add(magnitude<V>(g), V::set(k.eps)));
    p = V::add(p, V::div(V::mul(V::set(k.own[kStepSize]), m), v));
  }
};
