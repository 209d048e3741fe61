// Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019, algorithm 2), as torch.optim's.

template <class V, bool decoupled>
struct AdamRule {
  using F = typename V::F;
  INFINITY_FN Uses uses(const Constants&) { return {true, true}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    const double step = static_cast<double>(h.step);
    k.neg_step_size = static_cast<float>(-(h.lr / (1 - std::pow(h.beta1, step))));
    k.bias2_sqrt = static_cast<float>(std::sqrt(1 - std::pow(h.beta2, step)));
    k.bias2_sqrt_reciprocal = 1.0f / k.bias2_sqrt;
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay) {
      if (decoupled)
        p = V::mul(p, V::set(k.decay));
      else
        g = V::fma(p, V::set(k.weight_decay), g);
    }
    s.m = lerp<V>(s.m, g, k.one_minus_beta1);
    s.v = with_square<V>(s.v, g, k.beta2, k.one_minus_beta2);
    const F denominator =
        V::add(quotient<V>(V::sqrt(s.v), k.bias2_sqrt, k.bias2_sqrt_reciprocal), V::set(k.eps));
    p = V::add(p, V::div(V::mul(V::set(k.neg_step_size), s.m), denominator));
  }
};

template <class V>
using AdamW = AdamRule<V, true>;
template <class V>
using Adam = AdamRule<V, false>;
