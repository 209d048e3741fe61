// The update formulas, once, over a vector type V. Included by each SIMD unit inside a namespace of
// its own, so that no unit's code can be linked into another's.
//
// Formulas and their order of operations follow torch.optim's single-tensor implementations.

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

#include "optim/arithmetic.h"
#include "optim/rules.h"

// --- the loop ---

template <class V, template <class> class Weights, template <class> class Grads,
          template <class> class Moments, class RuleOfV>
INFINITY_FN inline void step_at(const Arrays& a, std::size_t i, const Constants& k) {
  using F = typename V::F;
  F g = Grads<V>::load(a.grad, i);
  for (int f = 0; f < k.factor_count; ++f) g = Grads<V>::round(V::mul(g, V::set(k.factors[f])));
  if (k.maximize) g = V::neg(g);
  F p = Weights<V>::load(a, i);
  State<V> s;
  const Uses uses = RuleOfV::uses(k);
#define INFINITY_LOAD(name, role, of_state) \
  if (uses.name) s.of_state = Moments<V>::load(a.name, i);
  INFINITY_MOMENTS(INFINITY_LOAD)
#undef INFINITY_LOAD
  RuleOfV::step(p, g, s, k);
#define INFINITY_STORE(name, role, of_state) \
  if (uses.name) Moments<V>::store(a.name, i, stored<V>(s.of_state));
  INFINITY_MOMENTS(INFINITY_STORE)
#undef INFINITY_STORE
  Weights<V>::store(a, i, stored<V>(p));
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

// The rules that this unit compiles: all, or the one that its build names.
constexpr bool in_unit([[maybe_unused]] Rule rule) {
#ifdef INFINITY_UNIT
  return rule == Rule::INFINITY_UNIT;
#else
  return true;
#endif
}

template <template <class> class RuleOf>
Uses uses_of(const Constants& k) {
  return RuleOf<Scalar>::uses(k);
}

template <template <class> class Weights, template <class> class Grads,
          template <class> class Moments>
Kernel by_rule(const Layout& layout) {
  switch (layout.rule) {
#define INFINITY_CASE(Name, NAME)                                        \
  case Rule::k##Name:                                                    \
    if constexpr (in_unit(Rule::k##Name))                                \
      return {run_kernel<Weights, Grads, Moments, Name>, uses_of<Name>}; \
    break;
    INFINITY_OFTEN_USED(INFINITY_CASE)
    INFINITY_SELDOM_USED(INFINITY_CASE)
#undef INFINITY_CASE
  }
  return {};
}

template <template <class> class Weights, template <class> class Grads>
Kernel block_by_rule(const Layout& layout) {
  switch (layout.rule) {
#define INFINITY_CASE(Name, NAME)                                     \
  case Rule::k##Name:                                                 \
    if constexpr (in_unit(Rule::k##Name))                             \
      return {run_block_kernel<Weights, Grads, Name>, uses_of<Name>}; \
    break;
    INFINITY_OFTEN_USED(INFINITY_CASE)
#ifdef INFINITY_OWN_LOOPS
    INFINITY_SELDOM_USED(INFINITY_CASE)
#else
    default:
      return {run_block_kernel<Weights, Grads, Other>, uses_of<Other>};
#endif
#undef INFINITY_CASE
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
