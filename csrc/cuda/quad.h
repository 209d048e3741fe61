// The GPU's vector type: four consecutive elements, so that a thread moves 8 or 16 bytes at once.
// Every operation is the scalar one, four times. Included inside the unit's namespace, after
// scalar.h.

struct Quad {
  struct F {
    float x[4];
  };
  static constexpr std::size_t width = 4;

  template <class Op>
  __device__ static F each(Op op) {
    F r;
#pragma unroll
    for (int j = 0; j < 4; ++j) r.x[j] = op(j);
    return r;
  }

  __device__ static F set(float a) { return {a, a, a, a}; }
  __device__ static F add(F a, F b) {
    return each([&](int j) { return Scalar::add(a.x[j], b.x[j]); });
  }
  __device__ static F sub(F a, F b) {
    return each([&](int j) { return Scalar::sub(a.x[j], b.x[j]); });
  }
  __device__ static F mul(F a, F b) {
    return each([&](int j) { return Scalar::mul(a.x[j], b.x[j]); });
  }
  __device__ static F div(F a, F b) {
    return each([&](int j) { return Scalar::div(a.x[j], b.x[j]); });
  }
  __device__ static F fma(F a, F b, F c) {
    return each([&](int j) { return Scalar::fma(a.x[j], b.x[j], c.x[j]); });
  }
  __device__ static F sqrt(F a) {
    return each([&](int j) { return Scalar::sqrt(a.x[j]); });
  }
  __device__ static F or_if_nan(F a, F b) {
    return each([&](int j) { return Scalar::or_if_nan(a.x[j], b.x[j]); });
  }
  __device__ static F neg(F a) {
    return each([&](int j) { return Scalar::neg(a.x[j]); });
  }
  __device__ static F sign(F a) {
    return each([&](int j) { return Scalar::sign(a.x[j]); });
  }
  __device__ static F round_bf16(F a) {
    return each([&](int j) { return Scalar::round_bf16(a.x[j]); });
  }
  __device__ static F round_f16(F a) {
    return each([&](int j) { return Scalar::round_f16(a.x[j]); });
  }

  // Integers, as the rules use them to compare and to take signs off.
  struct I {
    std::int32_t x[4];
  };
  template <class Op>
  __device__ static I each_word(Op op) {
    I r;
#pragma unroll
    for (int j = 0; j < 4; ++j) r.x[j] = op(j);
    return r;
  }
  __device__ static I iset(std::uint32_t a) {
    return each_word([&](int) { return Scalar::iset(a); });
  }
  __device__ static I as_int(F a) {
    return each_word([&](int j) { return Scalar::as_int(a.x[j]); });
  }
  __device__ static F as_float(I a) {
    return each([&](int j) { return Scalar::as_float(a.x[j]); });
  }
  __device__ static I iand(I a, I b) {
    return each_word([&](int j) { return a.x[j] & b.x[j]; });
  }
  __device__ static I imax(I a, I b) {
    return each_word([&](int j) { return Scalar::imax(a.x[j], b.x[j]); });
  }
  __device__ static I imin(I a, I b) {
    return each_word([&](int j) { return Scalar::imin(a.x[j], b.x[j]); });
  }
  __device__ static I if_less(I x, I y, I a, I b) {
    return each_word([&](int j) { return Scalar::if_less(x.x[j], y.x[j], a.x[j], b.x[j]); });
  }

  __device__ static F load_f32(const float* p) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    return {v.x, v.y, v.z, v.w};
  }
  __device__ static void store_f32(float* p, F a) {
    *reinterpret_cast<float4*>(p) = make_float4(a.x[0], a.x[1], a.x[2], a.x[3]);
  }
  __device__ static F load_bf16(const std::uint16_t* p) {
    const Halves h = load(p);
    return each([&](int j) { return Scalar::load_bf16(&h.x[j]); });
  }
  __device__ static void store_bf16(std::uint16_t* p, F a) {
    Halves h;
#pragma unroll
    for (int j = 0; j < 4; ++j) h.x[j] = Scalar::to_bf16(a.x[j]);
    store(p, h);
  }
  __device__ static F load_f16(const std::uint16_t* p) {
    const Halves h = load(p);
    return each([&](int j) { return Scalar::from_f16(h.x[j]); });
  }
  __device__ static void store_f16(std::uint16_t* p, F a) {
    Halves h;
#pragma unroll
    for (int j = 0; j < 4; ++j) h.x[j] = Scalar::to_f16(a.x[j]);
    store(p, h);
  }
  __device__ static void stream_bf16(std::uint16_t* p, F a) { store_bf16(p, a); }
  __device__ static void stream_f16(std::uint16_t* p, F a) { store_f16(p, a); }

  __device__ static F load_split(const std::uint16_t* weight, const std::uint16_t* low) {
    const Halves w = load(weight), l = load(low);
    return each([&](int j) { return Scalar::load_split(&w.x[j], &l.x[j]); });
  }
  __device__ static void store_split(std::uint16_t* weight, std::uint16_t* low, F a) {
    Halves w, l;
#pragma unroll
    for (int j = 0; j < 4; ++j) Scalar::store_split(&w.x[j], &l.x[j], a.x[j]);
    store(weight, w);
    store(low, l);
  }

 private:
  struct alignas(8) Halves {
    std::uint16_t x[4];
  };
  __device__ static Halves load(const std::uint16_t* p) {
    return *reinterpret_cast<const Halves*>(p);
  }
  __device__ static void store(std::uint16_t* p, Halves h) { *reinterpret_cast<Halves*>(p) = h; }
};
