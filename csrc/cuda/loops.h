// The GPU's loops over the formula: a grid over quads, and for 8-bit moments half a warp over each
// block of 64. Included by formula.h in place of its own.

constexpr int kThreads = 256;

template <template <class> class Weights, template <class> class Grads,
          template <class> class Moments, template <class> class RuleOf>
__global__ void __launch_bounds__(kThreads)
    step_quads(Arrays a, std::size_t begin, std::size_t end, const __grid_constant__ Constants k) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  const std::size_t first = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t quads = (end - begin) / Quad::width;
  for (std::size_t q = first; q < quads; q += stride)
    step_at<Quad, Weights, Grads, Moments, RuleOf<Quad>>(a, begin + q * Quad::width, k);
  for (std::size_t i = begin + quads * Quad::width + first; i < end; i += stride)
    step_at<Scalar, Weights, Grads, Moments, RuleOf<Scalar>>(a, i, k);
}

// The codes of four elements, which a thread moves at once.
struct alignas(4) FourCodes {
  std::uint8_t x[4];
};

__device__ inline void store_codes(std::uint8_t* codes, const FourCodes& found, int count) {
  if (count == 4)
    *reinterpret_cast<FourCodes*>(codes) = found;
  else
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < count) codes[j] = found.x[j];
}

// Half a warp has a block: lane j its elements 4 j to 4 j + 3.
template <template <class> class Weights, template <class> class Grads,
          template <class> class RuleOf>
__global__ void __launch_bounds__(kThreads)
    step_blocks(Arrays a, std::size_t begin, std::size_t end, const __grid_constant__ Constants k) {
  using Codes = Int8<Scalar>;
  using TheRule = RuleOf<Quad>;
  constexpr std::size_t kLanes = kMomentBlock / Quad::width;
  const std::size_t thread = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t group = thread / kLanes, first = thread % kLanes * Quad::width;
  const std::size_t groups = std::size_t{gridDim.x} * blockDim.x / kLanes;
  const unsigned mask = 0xFFFFu << (threadIdx.x & 16);
  const bool exp_avg = TheRule::uses(k).exp_avg, exp_avg_sq = TheRule::uses(k).exp_avg_sq;
  auto* m_codes = static_cast<std::uint8_t*>(a.exp_avg);
  auto* v_codes = static_cast<std::uint8_t*>(a.exp_avg_sq);
  for (std::size_t i = begin + group * kMomentBlock; i < end; i += groups * kMomentBlock) {
    const std::size_t block = i / kMomentBlock, at = i + first;
    // The others are padding, and stay zero.
    const int stepped = at >= end ? 0 : static_cast<int>(end - at < 4 ? end - at : 4);
    State<Quad> s;
    std::int32_t m_largest = 0, v_largest = 0;
    if (stepped) {
      Quad::F g = Grads<Quad>::load(a.grad, at);
      for (int f = 0; f < k.factor_count; ++f)
        g = Grads<Quad>::round(Quad::mul(g, Quad::set(k.factors[f])));
      if (k.maximize) g = Quad::neg(g);
      Quad::F p = Weights<Quad>::load(a, at);
      if (exp_avg) {
        const auto power = Codes::power(a.exp_avg_scale[block], Codes::kExpAvgField, 1);
        const FourCodes codes = *reinterpret_cast<const FourCodes*>(m_codes + at);
        s.m = Quad::each([&](int j) { return Codes::decode_exp_avg(&codes.x[j], power); });
      }
      if (exp_avg_sq) {
        const auto power = Codes::power(a.exp_avg_sq_scale[block], Codes::kExpAvgSqField, 1);
        const FourCodes codes = *reinterpret_cast<const FourCodes*>(v_codes + at);
        s.v = Quad::each([&](int j) { return Codes::decode_exp_avg_sq(&codes.x[j], power); });
      }
      TheRule::step(p, g, s, k);
      p = stored<Quad>(p), s.m = stored<Quad>(s.m);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= stepped) s.m.x[j] = s.v.x[j] = 0.0f;
        m_largest = Scalar::imax(m_largest, Scalar::as_int(s.m.x[j]) & 0x7FFFFFFF);
        v_largest = Scalar::imax(v_largest, Scalar::as_int(s.v.x[j]) & 0x7FFFFFFF);
      }
      if (stepped == 4)
        Weights<Quad>::store(a, at, p);
      else
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (j < stepped) Weights<Scalar>::store(a, at + j, p.x[j]);
    }
    const auto m_scale = static_cast<std::uint8_t>(__reduce_max_sync(mask, m_largest) >> 23);
    const auto v_scale = static_cast<std::uint8_t>(__reduce_max_sync(mask, v_largest) >> 23);
    const auto to_m = Codes::power(m_scale, Codes::kExpAvgField, -1);
    const auto to_v = Codes::power(v_scale, Codes::kExpAvgSqField, -1);
    FourCodes m_new, v_new;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto random = Codes::random(block, first + j, k.salt);
      Codes::encode_exp_avg(&m_new.x[j], to_m, s.m.x[j], Codes::low_bits(random));
      Codes::encode_exp_avg_sq(&v_new.x[j], to_v, s.v.x[j], Codes::high_bits(random));
    }
    if (exp_avg) store_codes(m_codes + at, m_new, stepped);
    if (exp_avg_sq) store_codes(v_codes + at, v_new, stepped);
    if (first == 0) {
      if (exp_avg) a.exp_avg_scale[block] = m_scale;
      if (exp_avg_sq) a.exp_avg_sq_scale[block] = v_scale;
    }
  }
}

inline unsigned blocks_for(std::size_t threads) {
  const std::size_t wanted = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(wanted < most_blocks() ? (wanted ? wanted : 1) : most_blocks());
}

template <template <class> class Weights, template <class> class Grads,
          template <class> class Moments, template <class> class RuleOf>
void run_kernel(const Arrays& a, std::size_t begin, std::size_t end, const Constants& k) {
  INFINITY_REQUIRE(begin % Quad::width == 0,
                   "a run on the GPU begins at a multiple of 4 elements, not at ", begin);
  const auto kernel = step_quads<Weights, Grads, Moments, RuleOf>;
  INFINITY_LAUNCH(kernel, blocks_for((end - begin) / Quad::width), kThreads, stream)(a, begin, end,
                                                                                     k);
}

template <template <class> class Weights, template <class> class Grads,
          template <class> class RuleOf>
void run_block_kernel(const Arrays& a, std::size_t begin, std::size_t end, const Constants& k) {
  INFINITY_REQUIRE(begin % kMomentBlock == 0,
                   "a run of 8-bit moments begins at a block of 64, not at ", begin);
  const auto kernel = step_blocks<Weights, Grads, RuleOf>;
  INFINITY_LAUNCH(kernel, blocks_for((end - begin + 3) / 4), kThreads, stream)(a, begin, end, k);
}
