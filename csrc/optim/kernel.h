// The optimizer kernels: one pass over flat arrays, each byte touched once.
//
//   weight    what the model computes with
//   master    what the optimizer updates: the weight itself, an fp32 array of its own, or, for
//             "split", the pair of a bf16 weight and the low 16 bits of the fp32 master
//   moments   exp_avg (momentum for SGD and Lion) and exp_avg_sq; some rules have others beside
//   run       consecutive elements with one set of hyperparameters and one step count
//
// The formula stands once (formula.h). The scalar, AVX2, AVX-512 and NEON units compile it over
// their own vector type and give the same bits: every operation in it is one correctly rounded IEEE
// operation, and there is one NaN.
//
// Thread safety: every function is a pure function of its arguments, and safe on any thread. Two
// threads may step disjoint elements of the same arrays. There is no state but the chosen unit, set
// at first use. Ownership: the arrays are the caller's, and have to stay valid for the call alone.
// There is no mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// How the formula's functions are declared: a GPU's compiler makes them for both processors.
#ifdef __CUDACC__
#define INFINITY_FN __host__ __device__ static
#else
#define INFINITY_FN static
#endif

namespace infinity {

// The arrays of moments: name, name of its role, name in a rule's state. This list is the only one:
// arrays, what a rule uses, its state, updates, shadows and bindings follow from it. The first have
// scales where moments are kInt8; rules with one of the others have none in 8 bits.
#define INFINITY_SCALED_MOMENTS(X) X(exp_avg, kExpAvg, m) X(exp_avg_sq, kExpAvgSq, v)
#define INFINITY_OTHER_MOMENTS(X) X(moment_3, kMoment3, third) X(moment_4, kMoment4, fourth)
#define INFINITY_MOMENTS(X) INFINITY_SCALED_MOMENTS(X) INFINITY_OTHER_MOMENTS(X)

// The rules: name of the struct (optim/rules), and name in Python. Those that are often used have
// kernels of their own for 8-bit moments, too, on a GPU all of them. setup.py reads the names here.
#define INFINITY_OFTEN_USED(X) X(AdamW, ADAMW) X(Adam, ADAM) X(Sgd, SGD) X(Lion, LION)
#define INFINITY_SELDOM_USED(X) \
  X(Adadelta, ADADELTA)         \
  X(Adagrad, ADAGRAD)           \
  X(Adamax, ADAMAX)             \
  X(Adan, ADAN)                 \
  X(AdEMAMix, ADEMAMIX)         \
  X(AMSGrad, AMSGRAD)           \
  X(ASGD, ASGD) X(NAdam, NADAM) X(RAdam, RADAM) X(RMSprop, RMSPROP) X(Rprop, RPROP)

enum class Rule : std::uint8_t {
#define INFINITY_NAME(Name, NAME) k##Name,
  INFINITY_OFTEN_USED(INFINITY_NAME) INFINITY_SELDOM_USED(INFINITY_NAME)
#undef INFINITY_NAME
};
enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16, kInt8 };  // kInt8: of moments only
enum class Master : std::uint8_t { kOwn, kSplit, kFloat32 };  // kOwn: the weight is its own master

constexpr std::size_t element_nbytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2;
}

constexpr std::size_t kMomentBlock = 64;  // elements with one scale, where moments are kInt8

// How one flat array is laid out; chooses the kernel.
struct Layout {
  Rule rule = Rule::kAdamW;
  DType weight = DType::kFloat32;
  Master master = Master::kOwn;
  DType grad = DType::kFloat32;
  DType moments = DType::kFloat32;
};

// Addresses of element 0. Null where the layout has no such array.
struct Arrays {
  void* weight = nullptr;
  void* master = nullptr;  // uint16 low halves for kSplit, fp32 for kFloat32
  const void* grad = nullptr;
#define INFINITY_MEMBER(name, role, of_state) void* name = nullptr;
  INFINITY_MOMENTS(INFINITY_MEMBER)
#undef INFINITY_MEMBER
  // of kInt8 moments, one per block; of block 0
#define INFINITY_MEMBER(name, role, of_state) std::uint8_t* name##_scale = nullptr;
  INFINITY_SCALED_MOMENTS(INFINITY_MEMBER)
#undef INFINITY_MEMBER
};

constexpr int kMaxGradFactors = 4;

// As torch.optim names them. `grad_factors` multiply the gradient one after the other, each product
// rounded to the gradient's dtype, as in-place multiplications of the gradient would have been.
struct Hyperparameters {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double momentum = 0, dampening = 0;
  double lr_decay = 0;  // of Adagrad
  double smallest = 0, largest = 0;  // step sizes of Rprop
  double momentum_decay = 0, mu_product = 1;  // of NAdam; the product with this step's factor
  double lambd = 0, eta = 0, mu = 1;  // of ASGD
  double beta3 = 0.9999, alpha = 0;  // of AdEMAMix in this step; beta3 also of Adan
  bool nesterov = false, maximize = false, decoupled = false, amsgrad = false, centered = false;
  bool fixed_decay = false;  // a decoupled one, whatever the rate
  bool fresh = false;  // the first step of these elements, if `step` counts those of a group
  std::int64_t step = 1;  // counted from 1
  std::vector<float> grad_factors;
};

struct Run {
  std::size_t begin = 0, end = 0;  // elements
  Hyperparameters hyper;
  // Steps before that one, each with a gradient of zeros.
  std::vector<Hyperparameters> missed{};
  bool has_gradient = true;  // false: only the missed steps
};

// Hyperparameters as the fp32 constants of the formula, prepared in double as torch does.
struct Constants {
  float decay, weight_decay;  // 1 - lr * weight_decay; weight_decay
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float neg_step_size, eps;  // -lr / (1 - beta1^t)
  float bias2_sqrt, bias2_sqrt_reciprocal;  // sqrt(1 - beta2^t)
  float momentum, one_minus_dampening, neg_lr;
  float own[5];  // of the rule
  Rule rule;
  bool has_decay, has_momentum, first, fresh, nesterov, maximize, decoupled, amsgrad, centered;
  std::uint32_t salt;  // of this step's random bits
  int factor_count;
  float factors[kMaxGradFactors];
};

Constants prepare(Rule rule, const Hyperparameters& hyper);

// What a rule reads and writes beside the weight, the master and the gradient; from the formula
// itself.
struct Uses {
#define INFINITY_MEMBER(name, role, of_state) bool name = false;
  INFINITY_MOMENTS(INFINITY_MEMBER)
#undef INFINITY_MEMBER
  bool has_scales() const {
#define INFINITY_OR(name, role, of_state) || name
    return !(false INFINITY_OTHER_MOMENTS(INFINITY_OR));
#undef INFINITY_OR
  }
};

struct Kernel {
  void (*step)(const Arrays& arrays, std::size_t begin, std::size_t end,
               const Constants& constants) = nullptr;
  Uses (*uses)(const Constants& constants) = nullptr;
  explicit operator bool() const { return step != nullptr; }
};

// The kernel of `layout` in the chosen SIMD unit. Throws UsageError when the combination has none.
Kernel find_kernel(const Layout& layout);

// fp32 values as kInt8 moments keep them, rounded to the nearest, and back. `values` that were
// decoded come out as the codes and scales they had (of scales above 31: those of numbers above
// 2^-96). `sq`: as exp_avg_sq, which has no sign.
void encode_moments(const float* values, std::uint8_t* codes, std::uint8_t* scales,
                    std::size_t count, bool sq);
void decode_moments(const std::uint8_t* codes, const std::uint8_t* scales, float* values,
                    std::size_t count, bool sq);

// Splits fp32 masters into bf16 weights (nearest, ties away from zero) and low halves, and joins
// them again.
void split_master(const float* master, std::uint16_t* weight, std::uint16_t* low,
                  std::size_t count);
void join_master(const std::uint16_t* weight, const std::uint16_t* low, float* master,
                 std::size_t count);

// The unit in use: "avx512", "avx2", "neon" or "scalar". INFINITY_SIMD chooses a lesser one. Best
// first.
std::string simd_unit();
std::vector<std::string> simd_units();

}  // namespace infinity
