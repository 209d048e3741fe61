// Sixteen lanes with AVX-512 F, BW, DQ and VL.

struct Avx512 {
  using F = __m512;
  static constexpr std::size_t width = 16;

  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F or_if_nan(F a, F b) {
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), b);
  }
  static F neg(F a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static F sign(F a) {
    const F one = _mm512_or_ps(_mm512_and_ps(a, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(1.0f));
    const F nonzero =
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ), one);
    return _mm512_mask_mov_ps(nonzero, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
  }

  using I = __m512i;
  static I iset(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static I positions(std::uint32_t first) {
    return iadd(iset(first),
                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I imax(I a, I b) { return _mm512_max_epi32(a, b); }
  static I imin(I a, I b) { return _mm512_min_epi32(a, b); }
  template <int n>
  static I shift_left(I a) {
    return _mm512_slli_epi32(a, n);
  }
  template <int n>
  static I shift_right(I a) {
    return _mm512_srli_epi32(a, n);
  }
  static I if_less(I x, I y, I a, I b) {
    return _mm512_mask_mov_epi32(b, _mm512_cmplt_epi32_mask(x, y), a);
  }
  static I to_int(F x) { return _mm512_cvttps_epi32(x); }
  static I as_int(F x) { return _mm512_castps_si512(x); }
  static F as_float(I a) { return _mm512_castsi512_ps(a); }
  static I load_u8(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_i8(const std::uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_u8(std::uint8_t* p, I a) {  // each lane holds 0..255
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
  static I or_masked(I a, I b, std::uint32_t mask) {
    return _mm512_ternarylogic_epi32(a, b, iset(mask), 0xF8);
  }
  static I rotate_left(I a, int n) {
    return _mm512_rolv_epi32(a, iset(static_cast<std::uint32_t>(n)));
  }
  using Power = F;
  static Power power(int exponent) { return set(static_cast<float>(exponent)); }
  static F times(F x, const Power& power) { return _mm512_scalef_ps(x, power); }
  static std::int32_t largest(I a) { return _mm512_reduce_max_epi32(a); }

  static F load_f32(const float* p) { return _mm512_loadu_ps(p); }
  static void store_f32(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F load_bf16(const std::uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(load_u16(p), 16));
  }
  static void store_bf16(std::uint16_t* p, F x) { store_u16(p, to_bf16(x)); }
  static void stream_bf16(std::uint16_t* p, F x) { stream(p, _mm512_cvtepi32_epi16(to_bf16(x))); }
  static void stream_f16(std::uint16_t* p, F x) {
    stream(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void finish_streams() { _mm_sfence(); }
  static F round_bf16(F x) { return _mm512_castsi512_ps(_mm512_slli_epi32(to_bf16(x), 16)); }
  static F load_f16(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_f16(std::uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static F round_f16(F x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

  static F load_split(const std::uint16_t* weight, const std::uint16_t* low) {
    const __m512i w = load_u16(weight), l = load_u16(low);
    const __m512i high = _mm512_sub_epi32(w, _mm512_srli_epi32(l, 15));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(high, 16), l));
  }
  static void store_split(std::uint16_t* weight, std::uint16_t* low, F x) {
    const __m512i raw = _mm512_castps_si512(x);
    // Where x is NaN: its sign and the quiet NaN's bits.
    const __m512i word = _mm512_mask_ternarylogic_epi32(raw, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                                        iset(0x80000000u), iset(0x7FC00000u), 0xEA);
    store_u16(weight, _mm512_srli_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x8000)), 16));
    store_u16(low, word);
  }

 private:
  static void stream(std::uint16_t* p, __m256i words) {
    auto* const to = reinterpret_cast<__m256i*>(p);
    reinterpret_cast<std::uintptr_t>(p) % 32 == 0 ? _mm256_stream_si256(to, words)
                                                  : _mm256_storeu_si256(to, words);
  }
  static __m512i load_u16(const std::uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_u16(std::uint16_t* p, __m512i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  static __m512i to_bf16(F x) {
    const __m512i word = _mm512_castps_si512(x);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7FFF)), even), 16);
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7FC0));
  }
};
