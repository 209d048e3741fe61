// NAdam (Dozat 2016), as torch.optim's. Its product of the factors so far (mu_product) comes with
// the hyperparameters.

template <class V>
struct NAdam {
  using F = typename V::F;
  static constexpr int kBias2 = 0, kBias2Reciprocal = 1, kOfGradient = 2, kOfMoment = 3;
  INFINITY_FN Uses uses(const Constants&) { return {true, true}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    const auto factor = [&](double step) {
      return h.beta1 * (1 - 0.5 * std::pow(0.96, step * h.momentum_decay));
    };
    const double step = static_cast<double>(h.step), now = factor(step), next = factor(step + 1);
    k.own[kBias2] = static_cast<float>(1 - std::pow(h.beta2, step));
    k.own[kBias2Reciprocal] = 1.0f / k.own[kBias2];
    k.own[kOfGradient] = static_cast<float>(-h.lr * (1 - now) / (1 - h.mu_product));
    k.own[kOfMoment] = static_cast<float>(-h.lr * next / (1 - h.mu_product * next));
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay && k.decoupled) p = V::mul(p, V::set(k.decay));
    if (k.has_decay && !k.decoupled) g = V::fma(p, V::set(k.weight_decay), g);
    s.m = lerp<V>(s.m, g, k.one_minus_beta1);
    s.v = with_square<V>(s.v, g, k.beta2, k.one_minus_beta2);
    const F mean = quotient<V>(s.v, k.own[kBias2], k.own[kBias2Reciprocal]);
    const F denominator = V::add(V::sqrt(mean), V::set(k.eps));
    p = V::add(p, V::div(V::mul(V::set(k.own[kOfGradient]), g), denominator));
    p = V::add(p, V::div(V::mul(V::set(k.own[kOfMoment]), s.m), denominator));
  }
};
