// Adagrad (Duchi et al. 2011), as torch.optim's. exp_avg_sq: the sum of squared gradients (sum).

template <class V>
struct Adagrad {
  using F = typename V::F;
  static constexpr int kStepSize = 0;
  INFINITY_FN Uses uses(const Constants&) { return {false, true}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    k.own[kStepSize] = static_cast<float>(-h.lr / (1 + double(h.step - 1) * h.lr_decay));
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    s.v = V::fma(g, g, s.v);
    const F denominator = V::add(V::sqrt(s.v), V::set(k.eps));
    p = V::add(p, V::div(V::mul(V::set(k.own[kStepSize]), g), denominator));
  }
};
