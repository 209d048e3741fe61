// Eight lanes with AVX2, FMA and F16C.

struct Avx2 {
  using F = __m256;
  static constexpr std::size_t width = 8;

  static F set(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F or_if_nan(F a, F b) { return _mm256_blendv_ps(a, b, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
  static F neg(F a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static F sign(F a) {
    const F zero = _mm256_setzero_ps();
    const F one = _mm256_or_ps(_mm256_and_ps(a, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
    const F nonzero = _mm256_and_ps(one, _mm256_cmp_ps(a, zero, _CMP_NEQ_UQ));
    return _mm256_blendv_ps(nonzero, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }

  using I = __m256i;
  static I iset(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static I positions(std::uint32_t first) {
    return iadd(iset(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I imax(I a, I b) { return _mm256_max_epi32(a, b); }
  static I imin(I a, I b) { return _mm256_min_epi32(a, b); }
  template <int n>
  static I shift_left(I a) {
    return _mm256_slli_epi32(a, n);
  }
  template <int n>
  static I shift_right(I a) {
    return _mm256_srli_epi32(a, n);
  }
  static I if_less(I x, I y, I a, I b) {
    return _mm256_blendv_epi8(b, a, _mm256_cmpgt_epi32(y, x));
  }
  static I to_int(F x) { return _mm256_cvttps_epi32(x); }
  static I as_int(F x) { return _mm256_castps_si256(x); }
  static F as_float(I a) { return _mm256_castsi256_ps(a); }
  static I load_u8(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_i8(const std::uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_u8(std::uint8_t* p, I a) {  // each lane holds 0..255
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, a), 0x08);
    const __m128i low = _mm256_castsi256_si128(words);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(low, low));
  }
  static I or_masked(I a, I b, std::uint32_t mask) {
    return _mm256_or_si256(a, iand(b, iset(mask)));
  }
  static I rotate_left(I a, int n) {
    return _mm256_or_si256(_mm256_sll_epi32(a, _mm_cvtsi32_si128(n)),
                           _mm256_srl_epi32(a, _mm_cvtsi32_si128(32 - n)));
  }
  struct Power {
    F first, second;
  };
  static Power power(int exponent) {
    const int second = exponent < -126 ? -126 : exponent > 126 ? 126 : 0;
    return {set(Scalar::two_to(exponent - second)), set(Scalar::two_to(second))};
  }
  static F times(F x, const Power& power) { return mul(mul(x, power.first), power.second); }
  static std::int32_t largest(I a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4E));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xB1));
    return _mm_cvtsi128_si32(x);
  }

  static F load_f32(const float* p) { return _mm256_loadu_ps(p); }
  static void store_f32(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F load_bf16(const std::uint16_t* p) { return widen(load_u16(p)); }
  static void store_bf16(std::uint16_t* p, F x) { store_u16(p, to_bf16(x)); }
  static void stream_bf16(std::uint16_t* p, F x) { stream(p, pack(to_bf16(x))); }
  static void stream_f16(std::uint16_t* p, F x) {
    stream(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void finish_streams() { _mm_sfence(); }
  static F round_bf16(F x) { return _mm256_castsi256_ps(_mm256_slli_epi32(to_bf16(x), 16)); }
  static F load_f16(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_f16(std::uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static F round_f16(F x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

  static F load_split(const std::uint16_t* weight, const std::uint16_t* low) {
    const __m256i w = load_u16(weight), l = load_u16(low);
    const __m256i high = _mm256_sub_epi32(w, _mm256_srli_epi32(l, 15));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(high, 16), l));
  }
  static void store_split(std::uint16_t* weight, std::uint16_t* low, F x) {
    const __m256i quiet =
        _mm256_or_si256(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x80000000)),
                        _mm256_set1_epi32(0x7FC00000));
    const __m256i word = _mm256_castps_si256(
        _mm256_blendv_ps(x, _mm256_castsi256_ps(quiet), _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    store_u16(weight, _mm256_srli_epi32(_mm256_add_epi32(word, _mm256_set1_epi32(0x8000)), 16));
    store_u16(low, _mm256_and_si256(word, _mm256_set1_epi32(0xFFFF)));
  }

 private:
  static __m256i load_u16(const std::uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m128i pack(__m256i x) {  // each lane holds 0..65535
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08));
  }
  static void store_u16(std::uint16_t* p, __m256i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack(x));
  }
  static void stream(std::uint16_t* p, __m128i words) {
    auto* const to = reinterpret_cast<__m128i*>(p);
    reinterpret_cast<std::uintptr_t>(p) % 16 == 0 ? _mm_stream_si128(to, words)
                                                  : _mm_storeu_si128(to, words);
  }
  static F widen(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
  static __m256i to_bf16(F x) {
    const __m256i word = _mm256_castps_si256(x);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(word, _mm256_set1_epi32(0x7FFF)), even), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  }
};
