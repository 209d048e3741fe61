// The update formulas, once, over a vector type V. Included by each SIMD unit inside a namespace of
// its own, so that no unit's code can be linked into another's.
//
// Formulas and their order of operations follow torch.optim's single-tensor implementations: AdamW
// (Loshchilov and Hutter 2019, algorithm 2), Adam (Kingma and Ba 2015), SGD with momentum
// (Sutskever et al. 2013), Lion (Chen et al. 2023, algorithm 2).

// --- masters: how a vector of fp32 masters is read from and written to the arrays ---

template <class V>
struct OwnFloat32 {
  INFINITY_FN typename V::F load(const Arrays& a, std::size_t i) {
    return V::load_f32(static_cast<float*>(a.weight) + i);
  }
  INFINITY_FN void store(const Arrays& a, std::size_t i, typename V::F x) {
    V::store_f32(static_cast<float*>(a.weight) + i, x);
  }
};

template <class V>
struct OwnBFloat16 {
  INFINITY_FN typename V::F load(const Arrays& a, std::size_t i) {
    return V::load_bf16(static_cast<std::uint16_t*>(a.weight) + i);
  }
  INFINITY_FN void store(const Arrays& a, std::size_t i, typename V::F x) {
    V::store_bf16(static_cast<std::uint16_t*>(a.weight) + i, x);
  }
};

template <class V>
struct OwnFloat16 {
  INFINITY_FN typename V::F load(const Arrays& a, std::size_t i) {
    return V::load_f16(static_cast<std::uint16_t*>(a.weight) + i);
  }
  INFINITY_FN void store(const Arrays& a, std::size_t i, typename V::F x) {
    V::store_f16(static_cast<std::uint16_t*>(a.weight) + i, x);
  }
};

template <class V>
struct Split {
  INFINITY_FN typename V::F load(const Arrays& a, std::size_t i) {
    return V::load_split(static_cast<std::uint16_t*>(a.weight) + i,
                         static_cast<std::uint16_t*>(a.master) + i);
  }
  INFINITY_FN void store(const Arrays& a, std::size_t i, typename V::F x) {
    V::store_split(static_cast<std::uint16_t*>(a.weight) + i,
                   static_cast<std::uint16_t*>(a.master) + i, x);
  }
};

template <class V>
struct Float32BFloat16 {
  INFINITY_FN typename V::F load(const Arrays& a, std::size_t i) {
    return V::load_f32(static_cast<float*>(a.master) + i);
  }
  INFINITY_FN void store(const Arrays& a, std::size_t i, typename V::F x) {
    V::store_f32(static_cast<float*>(a.master) + i, x);
    // the only array that is not read
    V::stream_bf16(static_cast<std::uint16_t*>(a.weight) + i, x);
  }
};

template <class V>
struct Float32Float16 {
  INFINITY_FN typename V::F load(const Arrays& a, std::size_t i) {
    return V::load_f32(static_cast<float*>(a.master) + i);
  }
  INFINITY_FN void store(const Arrays& a, std::size_t i, typename V::F x) {
    V::store_f32(static_cast<float*>(a.master) + i, x);
    V::stream_f16(static_cast<std::uint16_t*>(a.weight) + i, x);
  }
};

// --- gradients and moments: arrays of one dtype; `round` is what storing and loading again would
// do ---

template <class V>
struct AsFloat32 {
  INFINITY_FN typename V::F load(const void* p, std::size_t i) {
    return V::load_f32(static_cast<const float*>(p) + i);
  }
  INFINITY_FN void store(void* p, std::size_t i, typename V::F x) {
    V::store_f32(static_cast<float*>(p) + i, x);
  }
  INFINITY_FN typename V::F round(typename V::F x) { return x; }
};

template <class V>
struct AsBFloat16 {
  INFINITY_FN typename V::F load(const void* p, std::size_t i) {
    return V::load_bf16(static_cast<const std::uint16_t*>(p) + i);
  }
  INFINITY_FN void store(void* p, std::size_t i, typename V::F x) {
    V::store_bf16(static_cast<std::uint16_t*>(p) + i, x);
  }
  INFINITY_FN typename V::F round(typename V::F x) { return V::round_bf16(x); }
};

template <class V>
struct AsFloat16 {
  INFINITY_FN typename V::F load(const void* p, std::size_t i) {
    return V::load_f16(static_cast<const std::uint16_t*>(p) + i);
  }
  INFINITY_FN void store(void* p, std::size_t i, typename V::F x) {
    V::store_f16(static_cast<std::uint16_t*>(p) + i, x);
  }
  INFINITY_FN typename V::F round(typename V::F x) { return V::round_f16(x); }
};

// x / c for a constant c whose reciprocal is known, correctly rounded as the division would be but
// without one (Markstein 1990, theorem 8.4): the quotient's remainder is exact in a fused
// multiply-add. Where x is infinite the remainder is not a number, and the product is right by
// itself. x must not be near the smallest number.
template <class V>
INFINITY_FN inline typename V::F quotient(typename V::F x, float c, float reciprocal) {
  const typename V::F r = V::set(reciprocal);
  const typename V::F q = V::mul(x, r);
  const typename V::F remainder = V::fma(q, V::set(-c), x);
  return V::or_if_nan(V::fma(remainder, r, q), q);
}

// --- rules: one step of one vector. p: master, g: gradient, m: exp_avg, v: exp_avg_sq ---

template <class V, bool decoupled>
struct AdamRule {
  using F = typename V::F;
  INFINITY_FN bool uses_exp_avg(const Constants&) { return true; }
  static constexpr bool uses_exp_avg_sq = true;
  INFINITY_FN void step(F& p, F g, F& m, F& v, const Constants& k) {
    if (k.has_decay) {
      if (decoupled)
        p = V::mul(p, V::set(k.decay));
      else
        g = V::fma(p, V::set(k.weight_decay), g);
    }
    // torch's lerp: from the nearer end, so that a weight of 1 gives exactly the gradient
    if (k.one_minus_beta1 < 0.5f)
      m = V::fma(V::set(k.one_minus_beta1), V::sub(g, m), m);
    else
      m = V::fma(V::set(k.one_minus_beta1 - 1.0f), V::sub(g, m), g);
    v = V::fma(V::mul(V::set(k.one_minus_beta2), g), g, V::mul(v, V::set(k.beta2)));
    const F denominator =
        V::add(quotient<V>(V::sqrt(v), k.bias2_sqrt, k.bias2_sqrt_reciprocal), V::set(k.eps));
    p = V::add(p, V::div(V::mul(V::set(k.neg_step_size), m), denominator));
  }
};

template <class V>
struct SgdRule {
  using F = typename V::F;
  INFINITY_FN bool uses_exp_avg(const Constants& k) { return k.has_momentum; }
  static constexpr bool uses_exp_avg_sq = false;
  INFINITY_FN void step(F& p, F g, F& m, F&, const Constants& k) {
    if (k.has_decay) g = V::fma(p, V::set(k.weight_decay), g);
    if (k.has_momentum) {
      m = k.first ? g : V::fma(g, V::set(k.one_minus_dampening), V::mul(m, V::set(k.momentum)));
      g = k.nesterov ? V::fma(m, V::set(k.momentum), g) : m;
    }
    p = V::fma(g, V::set(k.neg_lr), p);
  }
};

template <class V>
struct LionRule {
  using F = typename V::F;
  INFINITY_FN bool uses_exp_avg(const Constants&) { return true; }
  static constexpr bool uses_exp_avg_sq = false;
  INFINITY_FN void step(F& p, F g, F& m, F&, const Constants& k) {
    if (k.has_decay) p = V::mul(p, V::set(k.decay));
    const F direction = V::sign(V::fma(g, V::set(k.one_minus_beta1), V::mul(m, V::set(k.beta1))));
    p = V::fma(direction, V::set(k.neg_lr), p);
    m = V::fma(g, V::set(k.one_minus_beta2), V::mul(m, V::set(k.beta2)));
  }
};

// --- the loop ---

template <class V, template <class> class Weights, template <class> class Grads,
          template <class> class Moments, class RuleOfV>
INFINITY_FN inline void step_at(const Arrays& a, std::size_t i, const Constants& k) {
  using F = typename V::F;
  F g = Grads<V>::load(a.grad, i);
  for (int f = 0; f < k.factor_count; ++f) g = Grads<V>::round(V::mul(g, V::set(k.factors[f])));
  if (k.maximize) g = V::neg(g);
  F p = Weights<V>::load(a, i);
  F m = V::set(0.0f), v = V::set(0.0f);
  const bool exp_avg = RuleOfV::uses_exp_avg(k);
  if (exp_avg) m = Moments<V>::load(a.exp_avg, i);
  if (RuleOfV::uses_exp_avg_sq) v = Moments<V>::load(a.exp_avg_sq, i);
  RuleOfV::step(p, g, m, v, k);
  if (exp_avg) Moments<V>::store(a.exp_avg, i, m);
  if (RuleOfV::uses_exp_avg_sq) Moments<V>::store(a.exp_avg_sq, i, v);
  Weights<V>::store(a, i, p);
}

#ifndef INFINITY_OWN_LOOPS  // a unit of another kind of processor has its own

template <template <class> class Weights, template <class> class Grads,
          template <class> class Moments, template <class> class RuleOf>
void run_kernel(const Arrays& a, std::size_t begin, std::size_t end, const Constants& constants) {
  // a copy of its own: stores through `a` cannot change it, so it stays in registers
  const Constants k = constants;
  std::size_t i = begin;
  for (; i + Vector::width <= end; i += Vector::width)
    step_at<Vector, Weights, Grads, Moments, RuleOf<Vector>>(a, i, k);
  for (; i < end; ++i) step_at<Scalar, Weights, Grads, Moments, RuleOf<Scalar>>(a, i, k);
  Vector::finish_streams();
}

#endif

#include "optim/int8.h"

// --- the table: layout -> kernel ---

#ifdef INFINITY_OWN_LOOPS
#include INFINITY_OWN_LOOPS
#endif

template <class V>
using AdamW = AdamRule<V, true>;
template <class V>
using Adam = AdamRule<V, false>;

template <template <class> class RuleOf>
Uses uses_of(const Constants& k) {
  return {RuleOf<Scalar>::uses_exp_avg(k), RuleOf<Scalar>::uses_exp_avg_sq};
}

template <template <class> class Weights, template <class> class Grads,
          template <class> class Moments>
Kernel by_rule(const Layout& layout) {
  switch (layout.rule) {
    case Rule::kAdamW:
      return {run_kernel<Weights, Grads, Moments, AdamW>, uses_of<AdamW>};
    case Rule::kAdam:
      return {run_kernel<Weights, Grads, Moments, Adam>, uses_of<Adam>};
    case Rule::kSgd:
      return {run_kernel<Weights, Grads, Moments, SgdRule>, uses_of<SgdRule>};
    case Rule::kLion:
      return {run_kernel<Weights, Grads, Moments, LionRule>, uses_of<LionRule>};
  }
  return {};
}

template <template <class> class Weights, template <class> class Grads>
Kernel block_by_rule(const Layout& layout) {
  switch (layout.rule) {
    case Rule::kAdamW:
      return {run_block_kernel<Weights, Grads, AdamW>, uses_of<AdamW>};
    case Rule::kAdam:
      return {run_block_kernel<Weights, Grads, Adam>, uses_of<Adam>};
    case Rule::kSgd:
      return {run_block_kernel<Weights, Grads, SgdRule>, uses_of<SgdRule>};
    case Rule::kLion:
      return {run_block_kernel<Weights, Grads, LionRule>, uses_of<LionRule>};
  }
  return {};
}

template <template <class> class Weights, template <class> class Grads>
Kernel by_moments(const Layout& layout) {
  switch (layout.moments) {
    case DType::kFloat32:
      return by_rule<Weights, Grads, AsFloat32>(layout);
    case DType::kBFloat16:
      return by_rule<Weights, Grads, AsBFloat16>(layout);
    case DType::kInt8:
      return block_by_rule<Weights, Grads>(layout);
    default:
      return {};
  }
}

// Gradients come in the weight's dtype or in fp32.
template <template <class> class Weights, template <class> class Own>
Kernel by_grad(const Layout& layout) {
  if (layout.grad == DType::kFloat32) return by_moments<Weights, AsFloat32>(layout);
  return layout.grad == layout.weight ? by_moments<Weights, Own>(layout) : Kernel{};
}

inline Kernel find(const Layout& layout) {
  switch (layout.weight) {
    case DType::kFloat32:
      return layout.master == Master::kOwn && layout.grad == DType::kFloat32
                 ? by_moments<OwnFloat32, AsFloat32>(layout)
                 : Kernel{};
    case DType::kBFloat16:
      switch (layout.master) {
        case Master::kOwn:
          return by_grad<OwnBFloat16, AsBFloat16>(layout);
        case Master::kSplit:
          return by_grad<Split, AsBFloat16>(layout);
        case Master::kFloat32:
          return by_grad<Float32BFloat16, AsBFloat16>(layout);
      }
      return {};
    case DType::kFloat16:
      switch (layout.master) {
        case Master::kOwn:
          return by_grad<OwnFloat16, AsFloat16>(layout);
        case Master::kFloat32:
          return by_grad<Float32Float16, AsFloat16>(layout);
        default:
          return {};
      }
    case DType::kInt8:
      return {};
  }
  return {};
}
