// Adamax (Kingma and Ba 2015, algorithm 2), as torch.optim's. exp_avg_sq: the infinity norm
// (exp_inf).

template <class V>
struct Adamax {
  using F = typename V::F;
  static constexpr int kStepSize = 0;
  INFINITY_FN Uses uses(const Constants&) { return {true, true}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    k.own[kStepSize] = static_cast<float>(-(h.lr / (1 - std::pow(h.beta1, double(h.step)))));
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    s.m = lerp<V>(s.m, g, k.one_minus_beta1);
    s.v = larger<V>(V::mul(s.v, V::set(k.beta2)), V::add(magnitude<V>(g), V::set(k.eps)));
    p = V::add(p, V::div(V::mul(V::set(k.own[kStepSize]), s.m), s.v));
  }
};
