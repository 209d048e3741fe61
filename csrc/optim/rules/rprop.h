// Rprop (Riedmiller and Braun 1993), as torch.optim's. exp_avg: the gradient before (prev),
// exp_avg_sq: the size of an element's step (step_size); beta1 and beta2 are its etas.

template <class V>
struct Rprop {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr int kSmallest = 0, kLargest = 1;
  INFINITY_FN Uses uses(const Constants&) { return {true, true}; }
  static void prepare(const Hyperparameters& h, Constants& k) {
    k.own[kSmallest] = static_cast<float>(h.smallest);
    k.own[kLargest] = static_cast<float>(h.largest);
  }
  INFINITY_FN void step(F& p, F g, State<V>& s, const Constants& k) {
    // Whether the gradient kept its sign. Of two NaN, it depends on the processor which one
    // results.
    const I zero = V::iset(0);
    const I turn = V::as_int(V::or_if_nan(V::sign(V::mul(g, s.m)), V::set(0.0f)));
    const F before = k.first ? V::neg(V::set(k.neg_lr)) : s.v;
    const I factor =
        V::if_less(zero, turn, V::as_int(V::set(k.beta2)),
                   V::if_less(turn, zero, V::as_int(V::set(k.beta1)), V::as_int(V::set(1.0f))));
    s.v = V::mul(before, V::as_float(factor));
    s.v = smaller<V>(larger<V>(s.v, V::set(k.own[kSmallest])), V::set(k.own[kLargest]));
    s.m = V::as_float(V::if_less(turn, zero, zero, V::as_int(g)));
    p = V::fma(V::neg(V::sign(s.m)), s.v, p);
  }
};
