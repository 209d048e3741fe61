// Four lanes with NEON, which every aarch64 processor has, fused multiply-add and half conversions
// included.

struct Neon {
  using F = float32x4_t;
  static constexpr std::size_t width = 4;

  static F set(float x) { return vdupq_n_f32(x); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F sqrt(F a) { return vsqrtq_f32(a); }
  static F or_if_nan(F a, F b) { return vbslq_f32(vceqq_f32(a, a), a, b); }
  static F neg(F a) { return vnegq_f32(a); }
  static F sign(F a) {
    const U one = bits(vbslq_f32(vdupq_n_u32(0x80000000), a, vdupq_n_f32(1.0f)));
    const U nonzero = vbicq_u32(one, vceqzq_f32(a));
    return vbslq_f32(vceqq_f32(a, a), from_bits(nonzero), a);
  }

  using I = int32x4_t;
  static I iset(std::uint32_t x) { return vdupq_n_s32(static_cast<std::int32_t>(x)); }
  static I positions(std::uint32_t first) {
    const std::int32_t ascending[4] = {0, 1, 2, 3};
    return iadd(iset(first), vld1q_s32(ascending));
  }
  static I iadd(I a, I b) { return vaddq_s32(a, b); }
  static I isub(I a, I b) { return vsubq_s32(a, b); }
  static I imul(I a, I b) { return vmulq_s32(a, b); }
  static I iand(I a, I b) { return vandq_s32(a, b); }
  static I ixor(I a, I b) { return veorq_s32(a, b); }
  static I imax(I a, I b) { return vmaxq_s32(a, b); }
  static I imin(I a, I b) { return vminq_s32(a, b); }
  template <int n>
  static I shift_left(I a) {
    return vshlq_n_s32(a, n);
  }
  template <int n>
  static I shift_right(I a) {
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), n));
  }
  static I if_less(I x, I y, I a, I b) { return vbslq_s32(vcltq_s32(x, y), a, b); }
  static I to_int(F x) {  // too large a number and NaN are INT32_MIN, as on x86
    return vbslq_s32(vcltq_f32(x, vdupq_n_f32(0x1p31f)), vcvtq_s32_f32(x), vdupq_n_s32(INT32_MIN));
  }
  static I as_int(F x) { return vreinterpretq_s32_f32(x); }
  static F as_float(I a) { return vreinterpretq_f32_s32(a); }
  static I load_u8(const std::uint8_t* p) {
    std::uint32_t four;
    std::memcpy(&four, p, 4);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
  }
  static I load_i8(const std::uint8_t* p) {
    std::uint32_t four;
    std::memcpy(&four, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)))));
  }
  static void store_u8(std::uint8_t* p, I a) {  // each lane holds 0..255
    const uint16x4_t words = vmovn_u32(vreinterpretq_u32_s32(a));
    const std::uint32_t four =
        vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    std::memcpy(p, &four, 4);
  }
  static I or_masked(I a, I b, std::uint32_t mask) { return vorrq_s32(a, iand(b, iset(mask))); }
  static I rotate_left(I a, int n) {
    const uint32x4_t x = vreinterpretq_u32_s32(a);
    return vreinterpretq_s32_u32(
        vorrq_u32(vshlq_u32(x, vdupq_n_s32(n)), vshlq_u32(x, vdupq_n_s32(n - 32))));
  }
  struct Power {
    F first, second;
  };
  static Power power(int exponent) {
    const int second = exponent < -126 ? -126 : exponent > 126 ? 126 : 0;
    return {set(Scalar::two_to(exponent - second)), set(Scalar::two_to(second))};
  }
  static F times(F x, const Power& power) { return mul(mul(x, power.first), power.second); }
  static std::int32_t largest(I a) { return vmaxvq_s32(a); }

  static F load_f32(const float* p) { return vld1q_f32(p); }
  static void store_f32(float* p, F x) { vst1q_f32(p, x); }
  static F load_bf16(const std::uint16_t* p) { return from_bits(vshll_n_u16(vld1_u16(p), 16)); }
  static void store_bf16(std::uint16_t* p, F x) { vst1_u16(p, vmovn_u32(to_bf16(x))); }
  static void stream_bf16(std::uint16_t* p, F x) { store_bf16(p, x); }
  static void stream_f16(std::uint16_t* p, F x) { store_f16(p, x); }
  static void finish_streams() {}
  static F round_bf16(F x) { return from_bits(vshlq_n_u32(to_bf16(x), 16)); }
  static F load_f16(const std::uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  static void store_f16(std::uint16_t* p, F x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
  }
  static F round_f16(F x) { return vcvt_f32_f16(vcvt_f16_f32(x)); }

  static F load_split(const std::uint16_t* weight, const std::uint16_t* low) {
    const U w = vmovl_u16(vld1_u16(weight)), l = vmovl_u16(vld1_u16(low));
    const U high = vsubq_u32(w, vshrq_n_u32(l, 15));
    return from_bits(vorrq_u32(vshlq_n_u32(high, 16), l));
  }
  static void store_split(std::uint16_t* weight, std::uint16_t* low, F x) {
    const U quiet = vorrq_u32(vandq_u32(bits(x), vdupq_n_u32(0x80000000)), vdupq_n_u32(0x7FC00000));
    const U word = vbslq_u32(vceqq_f32(x, x), bits(x), quiet);
    vst1_u16(weight, vshrn_n_u32(vaddq_u32(word, vdupq_n_u32(0x8000)), 16));
    vst1_u16(low, vmovn_u32(word));
  }

 private:
  using U = uint32x4_t;
  static U bits(F x) { return vreinterpretq_u32_f32(x); }
  static F from_bits(U x) { return vreinterpretq_f32_u32(x); }
  static U to_bf16(F x) {  // each lane holds 0..65535
    const U even = vandq_u32(vshrq_n_u32(bits(x), 16), vdupq_n_u32(1));
    const U rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits(x), vdupq_n_u32(0x7FFF)), even), 16);
    return vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7FC0));
  }
};
