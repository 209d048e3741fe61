// The GPU's loops over the formula: a grid over quads, and for 8-bit moments a warp over each block
// of 64. Included by formula.h in place of its own.

constexpr int kThreads = 256;

template <template <class> class Weights, template <class> class Grads,
          template <class> class Moments, template <class> class RuleOf>
__global__ void __launch_bounds__(kThreads)
    step_quads(Arrays a, std::size_t begin, std::size_t end, Constants k) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  const std::size_t first = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t quads = (end - begin) / Quad::width;
  for (std::size_t q = first; q < quads; q += stride)
    step_at<Quad, Weights, Grads, Moments, RuleOf<Quad>>(a, begin + q * Quad::width, k);
  for (std::size_t i = begin + quads * Quad::width + first; i < end; i += stride)
    step_at<Scalar, Weights, Grads, Moments, RuleOf<Scalar>>(a, i, k);
}

// Lane j has elements j and j + 32 of its warp's block.
template <template <class> class Weights, template <class> class Grads,
          template <class> class RuleOf>
__global__ void __launch_bounds__(kThreads)
    step_blocks(Arrays a, std::size_t begin, std::size_t end, Constants k) {
  using Codes = Int8<Scalar>;
  using TheRule = RuleOf<Scalar>;
  constexpr std::size_t kLanes = 32, kEach = kMomentBlock / kLanes;
  const std::size_t warps = std::size_t{gridDim.x} * blockDim.x / kLanes;
  const std::size_t warp = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) / kLanes,
                    lane = threadIdx.x % kLanes;
  const bool exp_avg = TheRule::uses_exp_avg(k);
  auto* m_codes = static_cast<std::uint8_t*>(a.exp_avg);
  auto* v_codes = static_cast<std::uint8_t*>(a.exp_avg_sq);
  for (std::size_t i = begin + warp * kMomentBlock; i < end; i += warps * kMomentBlock) {
    const std::size_t block = i / kMomentBlock;
    const auto m_power = Codes::power(exp_avg ? a.exp_avg_scale[block] : 0, Codes::kExpAvgField, 1);
    const auto v_power = Codes::power(TheRule::uses_exp_avg_sq ? a.exp_avg_sq_scale[block] : 0,
                                      Codes::kExpAvgSqField, 1);
    float m[kEach], v[kEach];
    std::int32_t m_largest = 0, v_largest = 0;
#pragma unroll
    for (std::size_t j = 0; j < kEach; ++j) {
      const std::size_t at = i + lane + j * kLanes;
      m[j] = v[j] = 0.0f;
      if (at >= end) continue;  // padding stays zero
      float g = Grads<Scalar>::load(a.grad, at);
      for (int f = 0; f < k.factor_count; ++f)
        g = Grads<Scalar>::round(Scalar::mul(g, k.factors[f]));
      if (k.maximize) g = Scalar::neg(g);
      float p = Weights<Scalar>::load(a, at);
      if (exp_avg) m[j] = Codes::decode_exp_avg(m_codes + at, m_power);
      if (TheRule::uses_exp_avg_sq) v[j] = Codes::decode_exp_avg_sq(v_codes + at, v_power);
      TheRule::step(p, g, m[j], v[j], k);
      m_largest = Scalar::imax(m_largest, Scalar::as_int(m[j]) & 0x7FFFFFFF);
      v_largest = Scalar::imax(v_largest, Scalar::as_int(v[j]) & 0x7FFFFFFF);
      Weights<Scalar>::store(a, at, p);
    }
    const auto m_scale = static_cast<std::uint8_t>(__reduce_max_sync(0xFFFFFFFFu, m_largest) >> 23);
    const auto v_scale = static_cast<std::uint8_t>(__reduce_max_sync(0xFFFFFFFFu, v_largest) >> 23);
    const auto to_m = Codes::power(m_scale, Codes::kExpAvgField, -1);
    const auto to_v = Codes::power(v_scale, Codes::kExpAvgSqField, -1);
#pragma unroll
    for (std::size_t j = 0; j < kEach; ++j) {
      const std::size_t element = lane + j * kLanes, at = i + element;
      if (at >= end) continue;
      const auto random = Codes::random(block, element, k.salt);
      if (exp_avg) Codes::encode_exp_avg(m_codes + at, to_m, m[j], Codes::low_bits(random));
      if (TheRule::uses_exp_avg_sq)
        Codes::encode_exp_avg_sq(v_codes + at, to_v, v[j], Codes::high_bits(random));
    }
    if (lane == 0) {
      if (exp_avg) a.exp_avg_scale[block] = m_scale;
      if (TheRule::uses_exp_avg_sq) a.exp_avg_sq_scale[block] = v_scale;
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
  INFINITY_LAUNCH(kernel, blocks_for((end - begin + 1) / 2), kThreads, stream)(a, begin, end, k);
}
