// What several rules have. Included by each SIMD unit inside a namespace of its own.

// The moments of one vector.
template <class V>
struct State {
#define INFINITY_MEMBER(name, role, of_state) typename V::F of_state = V::set(0.0f);
  INFINITY_MOMENTS(INFINITY_MEMBER)
#undef INFINITY_MEMBER
};

// x / c for a constant c whose reciprocal is known, correctly rounded as the division would be but
// without one (Markstein 1990, theorem 8.4): the quotient's remainder is exact in a fused
// multiply-add. If x is infinite, the remainder is not a number, and the product is right by
// itself. x must not be near the smallest number.
template <class V>
INFINITY_FN inline typename V::F quotient(typename V::F x, float c, float reciprocal) {
  const typename V::F r = V::set(reciprocal);
  const typename V::F q = V::mul(x, r);
  const typename V::F remainder = V::fma(q, V::set(-c), x);
  return V::or_if_nan(V::fma(remainder, r, q), q);
}

// torch's lerp of m to g by a weight: from the nearer end, so that a weight of 1 gives exactly g.
template <class V>
INFINITY_FN inline typename V::F lerp(typename V::F m, typename V::F g, float weight) {
  if (weight < 0.5f) return V::fma(V::set(weight), V::sub(g, m), m);
  return V::fma(V::set(weight - 1.0f), V::sub(g, m), g);
}

// v times `beta`, and the square of g times the rest: torch's v.mul_(beta).addcmul_(g, g).
template <class V>
INFINITY_FN inline typename V::F with_square(typename V::F v, typename V::F g, float beta,
                                             float rest) {
  return V::fma(V::mul(V::set(rest), g), g, V::mul(v, V::set(beta)));
}

template <class V>
INFINITY_FN inline typename V::F magnitude(typename V::F x) {
  return V::as_float(V::iand(V::as_int(x), V::iset(0x7FFFFFFF)));
}

// Of numbers that are not negative: their words order as they do, a NaN above all.
template <class V>
INFINITY_FN inline typename V::F larger(typename V::F a, typename V::F b) {
  return V::as_float(V::imax(V::as_int(a), V::as_int(b)));
}
template <class V>
INFINITY_FN inline typename V::F smaller(typename V::F a, typename V::F b) {
  return V::as_float(V::imin(V::as_int(a), V::as_int(b)));
}

// x, or the one NaN that is ever stored: which of two an operation returns depends on the processor
// and on the compiler.
template <class V>
INFINITY_FN inline typename V::F stored(typename V::F x) {
  return V::or_if_nan(x, V::set(__builtin_nanf("")));
}
