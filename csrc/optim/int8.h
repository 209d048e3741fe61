// 8-bit block-wise moments: how a block of 64 fp32 values is kept in 64 codes and one scale.
// Included by each SIMD unit inside a namespace of its own.
//
//   scale   the biased exponent of the block's largest value, one byte
//   code    a small float: three bits of mantissa and an exponent, four bits of it and a sign for
//   exp_avg, five bits for
//           exp_avg_sq. The largest exponent is the scale's, the smallest has subnormals, and code
//           0 is zero
//
// A step moves exp_avg_sq by a thousandth, far less than the distance of two codes (an eighth), so
// rounding to the nearest would never let it fall again. Rounding is stochastic: up with the
// probability of the distance travelled, so that the expected value is exact. The random bits are a
// hash of the element's position and the step: the same wherever the state lives and however it is
// cut up.
//
// A code shifted to the place of an fp32 exponent and mantissa is an fp32 number, subnormals
// included, that only a power of two parts from its value: a multiplication decodes, and encodes up
// to the rounding.

template <class V>
struct Int8 {
  using F = typename V::F;
  using I = typename V::I;

  static constexpr int kMantissaShift = 20;  // a code's lowest bit in an fp32 word
  static constexpr int kExpAvgField = 15, kExpAvgSqField = 31;  // the largest exponent of a code
  // as random bits: to the nearest
  static constexpr std::uint32_t kNearest = (1u << (kMantissaShift - 1)) - 1;

  using Power = typename V::Power;
  // From codes to the values of a block, or back with `sign` -1.
  INFINITY_FN Power power(std::uint8_t scale, int field, int sign) {
    return V::power(sign * (static_cast<int>(scale) - field));
  }

  // Lowbias32 (Wellons 2018) of the step and the place. Of a block, elements 16 apart share a word,
  // rotated.
  INFINITY_FN I random(std::size_t block, std::size_t element, std::uint32_t salt) {
    I x = V::positions(static_cast<std::uint32_t>(block * 16 + element % 16) + salt);
    x = V::imul(V::ixor(x, V::template shift_right<16>(x)), V::iset(0x7FEB352Du));
    x = V::imul(V::ixor(x, V::template shift_right<15>(x)), V::iset(0x846CA68Bu));
    x = V::ixor(x, V::template shift_right<16>(x));
    return V::rotate_left(x, static_cast<int>(element / 16 * 8));
  }
  // The low 20 bits round exp_avg, the high 20 bits exp_avg_sq.
  INFINITY_FN I low_bits(I random) { return V::iand(random, V::iset((1u << kMantissaShift) - 1)); }
  INFINITY_FN I high_bits(I random) { return V::template shift_right<32 - kMantissaShift>(random); }

  INFINITY_FN F decode_exp_avg(const std::uint8_t* codes, const Power& power) {
    const I code = V::load_i8(codes);
    const F value = decode(V::iand(code, V::iset(0x7F)), power);
    return V::as_float(V::or_masked(V::as_int(value), code, kSign));
  }

  INFINITY_FN F decode_exp_avg_sq(const std::uint8_t* codes, const Power& power) {
    return decode(V::load_u8(codes), power);
  }

  INFINITY_FN void encode_exp_avg(std::uint8_t* codes, const Power& power, F x, I random20) {
    const I word = V::as_int(x);
    const I code = encode(V::as_float(V::iand(word, V::iset(~kSign))), power, random20, 127);
    V::store_u8(codes, V::or_masked(code, V::template shift_right<24>(word), 0x80));
  }

  INFINITY_FN void encode_exp_avg_sq(std::uint8_t* codes, const Power& power, F x, I random20) {
    // a NaN may have a sign
    const F magnitude = V::as_float(V::iand(V::as_int(x), V::iset(~kSign)));
    const I code = encode(magnitude, power, random20, 255);
    // What is not zero stays so: it is divided by.
    V::store_u8(codes, V::imax(code, V::imin(V::as_int(magnitude), V::iset(1))));
  }

 private:
  static constexpr std::uint32_t kSign = 0x80000000u;

  INFINITY_FN F decode(I code, const Power& power) {
    return V::times(V::as_float(V::template shift_left<kMantissaShift>(code)), power);
  }

  INFINITY_FN I encode(F magnitude, const Power& power, I random20, std::uint32_t largest) {
    const I word = V::as_int(V::times(magnitude, power));
    return V::imin(V::template shift_right<kMantissaShift>(V::iadd(word, random20)),
                   V::iset(largest));
  }
};

#ifndef INFINITY_OWN_LOOPS

// One block of 64 elements from `i`, of which the first `count` (a multiple of the width) are
// stepped; the others are padding and stay zero. Stepping and encoding are apart, so that one
// block's stepping hides the other's encoding, which waits for the largest of its block.
template <class V, template <class> class Weights, template <class> class Grads, class RuleOfV>
class Block {
 public:
  using F = typename V::F;
  using Codes = Int8<V>;

  __attribute__((always_inline)) Block(const Arrays& a, std::size_t i, std::size_t count,
                                       const Constants& k)
      : i_(i),
        vectors_(count / V::width),
        exp_avg_(RuleOfV::uses(k).exp_avg),
        exp_avg_sq_(RuleOfV::uses(k).exp_avg_sq) {
    const std::size_t block = i / kMomentBlock;
    const auto m_power =
        Codes::power(exp_avg_ ? a.exp_avg_scale[block] : 0, Codes::kExpAvgField, 1);
    const auto v_power =
        Codes::power(exp_avg_sq_ ? a.exp_avg_sq_scale[block] : 0, Codes::kExpAvgSqField, 1);
#pragma GCC unroll 8
    for (std::size_t j = 0; j < vectors_; ++j) {
      const std::size_t at = i + j * V::width;
      F g = Grads<V>::load(a.grad, at);
      for (int f = 0; f < k.factor_count; ++f) g = Grads<V>::round(V::mul(g, V::set(k.factors[f])));
      if (k.maximize) g = V::neg(g);
      F p = Weights<V>::load(a, at);
      State<V> s;
      if (exp_avg_) s.m = Codes::decode_exp_avg(codes(a.exp_avg) + at, m_power);
      if (exp_avg_sq_) s.v = Codes::decode_exp_avg_sq(codes(a.exp_avg_sq) + at, v_power);
      RuleOfV::step(p, g, s, k);
      s.m = stored<V>(s.m);
      m_largest_ = V::imax(m_largest_, V::iand(V::as_int(s.m), V::iset(0x7FFFFFFF)));
      v_largest_ = V::imax(v_largest_, V::iand(V::as_int(s.v), V::iset(0x7FFFFFFF)));
      Weights<V>::store(a, at, stored<V>(p));
      m_[j] = s.m, v_[j] = s.v;
    }
  }

  __attribute__((always_inline)) void encode(const Arrays& a, const Constants& k) const {
    const std::size_t block = i_ / kMomentBlock;
    const auto m_scale = static_cast<std::uint8_t>(V::largest(m_largest_) >> 23);
    const auto v_scale = static_cast<std::uint8_t>(V::largest(v_largest_) >> 23);
    const auto m_power = Codes::power(m_scale, Codes::kExpAvgField, -1);
    const auto v_power = Codes::power(v_scale, Codes::kExpAvgSqField, -1);
#pragma GCC unroll 8
    for (std::size_t j = 0; j < vectors_; ++j) {
      const std::size_t at = i_ + j * V::width;
      const auto random = Codes::random(block, j * V::width, k.salt);
      if (exp_avg_)
        Codes::encode_exp_avg(codes(a.exp_avg) + at, m_power, m_[j], Codes::low_bits(random));
      if (exp_avg_sq_)
        Codes::encode_exp_avg_sq(codes(a.exp_avg_sq) + at, v_power, v_[j],
                                 Codes::high_bits(random));
    }
    if (exp_avg_) a.exp_avg_scale[block] = m_scale;
    if (exp_avg_sq_) a.exp_avg_sq_scale[block] = v_scale;
  }

 private:
  static std::uint8_t* codes(void* array) { return static_cast<std::uint8_t*>(array); }

  const std::size_t i_, vectors_;
  const bool exp_avg_, exp_avg_sq_;
  F m_[kMomentBlock / V::width], v_[kMomentBlock / V::width];
  typename V::I m_largest_ = V::iset(0), v_largest_ = V::iset(0);
};

template <template <class> class Weights, template <class> class Grads,
          template <class> class RuleOf>
void run_block_kernel(const Arrays& arrays, std::size_t begin, std::size_t end,
                      const Constants& constants) {
  // Copies of their own: stores through the arrays cannot change them, so they stay in registers.
  const Arrays a = arrays;
  const Constants k = constants;
  using Whole = Block<Vector, Weights, Grads, RuleOf<Vector>>;
  std::size_t i = begin;
  for (; i + 2 * kMomentBlock <= end; i += 2 * kMomentBlock) {
    const Whole first(a, i, kMomentBlock, k), second(a, i + kMomentBlock, kMomentBlock, k);
    first.encode(a, k);
    second.encode(a, k);
  }
  for (; i < end; i += kMomentBlock) {
    const std::size_t count = end - i < kMomentBlock ? end - i : kMomentBlock;
    Block<Scalar, Weights, Grads, RuleOf<Scalar>>(a, i, count, k).encode(a, k);
  }
  Vector::finish_streams();
}

#endif
