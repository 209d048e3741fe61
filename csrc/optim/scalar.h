// The vector type of width one: the definition of every operation, and the tail of every wider
// unit. Included by each SIMD unit inside a namespace of its own.

struct Scalar {
  using F = float;
  static constexpr std::size_t width = 1;

  INFINITY_FN F set(float x) { return x; }
  INFINITY_FN F add(F a, F b) { return a + b; }
  INFINITY_FN F sub(F a, F b) { return a - b; }
  INFINITY_FN F mul(F a, F b) { return a * b; }
  INFINITY_FN F div(F a, F b) { return a / b; }
  INFINITY_FN F fma(F a, F b, F c) { return std::fma(a, b, c); }
  INFINITY_FN F sqrt(F a) { return std::sqrt(a); }
  INFINITY_FN F or_if_nan(F a, F b) { return a == a ? a : b; }
  INFINITY_FN F neg(F a) { return from_bits(bits(a) ^ 0x80000000u); }
  // torch.sign: 0 for zeros of either sign; NaN stays NaN
  INFINITY_FN F sign(F a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a == 0 ? 0.0f : a; }

  // Integers of 32 bits, for the codes of 8-bit moments. Arithmetic wraps; comparisons are signed.
  using I = std::int32_t;
  INFINITY_FN I iset(std::uint32_t x) { return static_cast<I>(x); }
  INFINITY_FN I positions(std::uint32_t first) { return iset(first); }
  INFINITY_FN I iadd(I a, I b) { return iset(unsigned_(a) + unsigned_(b)); }
  INFINITY_FN I isub(I a, I b) { return iset(unsigned_(a) - unsigned_(b)); }
  INFINITY_FN I imul(I a, I b) { return iset(unsigned_(a) * unsigned_(b)); }
  INFINITY_FN I iand(I a, I b) { return a & b; }
  INFINITY_FN I ixor(I a, I b) { return a ^ b; }
  INFINITY_FN I imax(I a, I b) { return a > b ? a : b; }
  INFINITY_FN I imin(I a, I b) { return a < b ? a : b; }
  template <int n>
  INFINITY_FN I shift_left(I a) {
    return iset(unsigned_(a) << n);
  }
  template <int n>
  INFINITY_FN I shift_right(I a) {
    return iset(unsigned_(a) >> n);
  }
  INFINITY_FN I if_less(I x, I y, I a, I b) { return x < y ? a : b; }
  // towards zero; x is not below 0
  INFINITY_FN I to_int(F x) { return x < 0x1p31f ? static_cast<I>(x) : INT32_MIN; }
  INFINITY_FN I as_int(F x) { return iset(bits(x)); }
  INFINITY_FN F as_float(I a) { return from_bits(unsigned_(a)); }
  INFINITY_FN I load_u8(const std::uint8_t* p) { return *p; }
  INFINITY_FN I load_i8(const std::uint8_t* p) { return static_cast<std::int8_t>(*p); }
  INFINITY_FN void store_u8(std::uint8_t* p, I a) { *p = static_cast<std::uint8_t>(a); }
  INFINITY_FN std::int32_t largest(I a) { return a; }
  INFINITY_FN I or_masked(I a, I b, std::uint32_t mask) { return a | (b & iset(mask)); }
  INFINITY_FN I rotate_left(I a, int n) {
    return n ? iset(unsigned_(a) << n | unsigned_(a) >> (32 - n)) : a;
  }
  // A power of two, as two factors: one float may not hold it. Only one of the products is ever
  // inexact.
  struct Power {
    F first, second;
  };
  INFINITY_FN Power power(int exponent) {
    const int second = exponent < -126 ? -126 : exponent > 126 ? 126 : 0;
    return {set(two_to(exponent - second)), set(two_to(second))};
  }
  INFINITY_FN F times(F x, const Power& power) { return mul(mul(x, power.first), power.second); }
  INFINITY_FN float two_to(int exponent) {
    return from_bits(static_cast<std::uint32_t>(exponent + 127) << 23);
  }
  INFINITY_FN std::uint32_t unsigned_(I a) { return static_cast<std::uint32_t>(a); }

  INFINITY_FN F load_f32(const float* p) { return *p; }
  INFINITY_FN void store_f32(float* p, F x) { *p = x; }
  INFINITY_FN F load_bf16(const std::uint16_t* p) { return from_bits(std::uint32_t{*p} << 16); }
  INFINITY_FN void store_bf16(std::uint16_t* p, F x) { *p = to_bf16(x); }
  // Stores to memory that nobody reads here: past the caches, where there is a way and the address
  // allows it.
  INFINITY_FN void stream_bf16(std::uint16_t* p, F x) { store_bf16(p, x); }
  INFINITY_FN void stream_f16(std::uint16_t* p, F x) { store_f16(p, x); }
  INFINITY_FN void finish_streams() {}
  INFINITY_FN F round_bf16(F x) { return from_bits(std::uint32_t{to_bf16(x)} << 16); }
  INFINITY_FN F load_f16(const std::uint16_t* p) { return from_f16(*p); }
  INFINITY_FN void store_f16(std::uint16_t* p, F x) { *p = to_f16(x); }
  INFINITY_FN F round_f16(F x) { return from_f16(to_f16(x)); }

  // master = ((bits(weight) - (low >> 15)) << 16) | low: the weight was rounded away from zero when
  // low's top bit is set, so one is taken off again.
  INFINITY_FN F load_split(const std::uint16_t* weight, const std::uint16_t* low) {
    return from_bits(((std::uint32_t{*weight} - (std::uint32_t{*low} >> 15)) << 16) | *low);
  }
  // A NaN keeps its sign and becomes the quiet one, whose low half is zero: rounding other NaNs up
  // would wrap the weight around to a number, and training would go on as if nothing had happened.
  INFINITY_FN void store_split(std::uint16_t* weight, std::uint16_t* low, F x) {
    std::uint32_t word = bits(x);
    if ((word & 0x7FFFFFFFu) > 0x7F800000u) word = (word & 0x80000000u) | 0x7FC00000u;
    *weight = static_cast<std::uint16_t>((word + 0x8000u) >> 16);
    *low = static_cast<std::uint16_t>(word);
  }

  INFINITY_FN std::uint32_t bits(F x) {
    std::uint32_t word;
    std::memcpy(&word, &x, 4);
    return word;
  }
  INFINITY_FN F from_bits(std::uint32_t word) {
    F x;
    std::memcpy(&x, &word, 4);
    return x;
  }

  // Nearest, ties to even, as torch casts; NaN becomes the quiet NaN.
  INFINITY_FN std::uint16_t to_bf16(F x) {
    const std::uint32_t word = bits(x);
    if ((word & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return static_cast<std::uint16_t>((word + 0x7FFFu + ((word >> 16) & 1)) >> 16);
  }

  INFINITY_FN F from_f16(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1F;
    const std::uint32_t mantissa = half & 0x3FF;
    if (exponent == 0x1F)
      return from_bits(sign | 0x7F800000u | (mantissa ? 0x400000u | (mantissa << 13) : 0));
    if (exponent) return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const F value = static_cast<F>(mantissa) * 0x1p-24f;  // subnormal: exact
    return from_bits(sign | bits(value));
  }

  // Nearest, ties to even. The addition of a power of two lets the FPU do the rounding of
  // subnormals.
  INFINITY_FN std::uint16_t to_f16(F x) {
    const std::uint32_t word = bits(x);
    const std::uint16_t sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
    const std::uint32_t magnitude = word & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u)
      return sign | 0x7E00 | static_cast<std::uint16_t>((magnitude >> 13) & 0x3FF);
    if (magnitude >= 0x477FF000u) return sign | 0x7C00;  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {  // below 2^-14: subnormal
      // 0.5 has an ulp of 2^-24, the smallest half
      const F rounded = from_bits(magnitude) + 0.5f;
      return sign | static_cast<std::uint16_t>(bits(rounded) - 0x3F000000u);
    }
    const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1);
    return sign | static_cast<std::uint16_t>((rounded - 0x38000000u) >> 13);
  }
};
