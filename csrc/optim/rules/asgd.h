// Averaged SGD (Polyak and Juditsky 1992), as torch.optim's. exp_avg: the average of the weights
// (ax). Its step size (eta) and the average's weight (mu) come with the hyperparameters.

template <class V>
struct ASGD {
  using F = typename V::F;
  static constexpr int kDecay = 0, kNegEta = 1, kMu = 2;
  INFINITY_FN Uses uses(const Constants&) { return {true, false}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    k.own[kDecay] = static_cast<float>(1 - h.lambd * h.eta);
    k.own[kNegEta] = static_cast<float>(-h.eta);
    k.own[kMu] = static_cast<float>(h.mu);
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    p = V::fma(g, V::set(k.own[kNegEta]), V::mul(p, V::set(k.own[kDecay])));
    s.m = k.own[kMu] == 1 ? p : V::add(s.m, V::mul(V::sub(p, s.m), V::set(k.own[kMu])));
  }
};
