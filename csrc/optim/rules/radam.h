// RAdam (Liu et al. 2020), as torch.optim's.

template <class V>
struct RAdam {
  using F = typename V::F;
  static constexpr int kBias1 = 0, kLr = 1, kRectification = 2;  // 0: the first steps have none
  INFINITY_FN Uses uses(const Constants&) { return {true, true}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    const double step = static_cast<double>(h.step), power = std::pow(h.beta2, step);
    const double most = 2 / (1 - h.beta2) - 1, rho = most - 2 * step * power / (1 - power);
    const double rectified = (rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho);
    k.own[kBias1] = static_cast<float>(1 - std::pow(h.beta1, step));
    k.own[kLr] = static_cast<float>(h.lr);
    k.own[kRectification] = rho > 5 ? static_cast<float>(std::sqrt(rectified)) : 0.0f;
    k.bias2_sqrt = static_cast<float>(std::sqrt(1 - power));
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay && k.decoupled) p = V::mul(p, V::set(k.decay));
    if (k.has_decay && !k.decoupled) g = V::fma(p, V::set(k.weight_decay), g);
    s.m = lerp<V>(s.m, g, k.one_minus_beta1);
    s.v = with_square<V>(s.v, g, k.beta2, k.one_minus_beta2);
    F update = V::mul(V::div(s.m, V::set(k.own[kBias1])), V::set(k.own[kLr]));
    if (k.own[kRectification] > 0) {
      const F adapted = V::div(V::set(k.bias2_sqrt), V::add(V::sqrt(s.v), V::set(k.eps)));
      update = V::mul(V::mul(update, adapted), V::set(k.own[kRectification]));
    }
    p = V::sub(p, update);
  }
};
