// Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019, algorithm 2), as torch.optim's.

template <class V, bool decoupled>
struct AdamRule {
  using F = typename V::F;
  INFINITY_FN bool uses_exp_avg(const Constants&) { return true; }
  INFINITY_FN bool uses_exp_avg_sq(const Constants&) { return true; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    const double step = static_cast<double>(h.step);
    k.neg_step_size = static_cast<float>(-(h.lr / (1 - std::pow(h.beta1, step))));
    k.bias2_sqrt = static_cast<float>(std::sqrt(1 - std::pow(h.beta2, step)));
    k.bias2_sqrt_reciprocal = 1.0f / k.bias2_sqrt;
  }
  INFINITY_FN void step(F& p, F g, F& m, F& v, const Constants& k) {
    if (k.has_decay) {
      if (decoupled)
        p = V::mul(p, V::set(k.decay));
      else
        g = V::fma(p, V::set(k.weight_decay), g);
    }
    m = lerp<V>(m, g, k.one_minus_beta1);
    v = with_square<V>(v, g, k.beta2, k.one_minus_beta2);
    const F denominator =
        V::add(quotient<V>(V::sqrt(v), k.bias2_sqrt, k.bias2_sqrt_reciprocal), V::set(k.eps));
    p = V::add(p, V::div(V::mul(V::set(k.neg_step_size), m), denominator));
  }
};

template <class V>
using AdamW = AdamRule<V, true>;
template <class V>
using Adam = AdamRule<V, false>;
