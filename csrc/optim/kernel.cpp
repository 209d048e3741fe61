#include "optim/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "base/rounding.h"

namespace infinity {

namespace scalar_unit {
Kernel find_kernel(const Layout& layout);
}
#ifdef INFINITY_HAVE_AVX
namespace avx2_unit {
Kernel find_kernel(const Layout& layout);
}
namespace avx512_unit {
Kernel find_kernel(const Layout& layout);
}
#endif
#ifdef INFINITY_HAVE_NEON
namespace neon_unit {
Kernel find_kernel(const Layout& layout);
}
#endif

namespace {

#include "optim/scalar.h"

using Vector = Scalar;

#include "optim/arithmetic.h"
#include "optim/int8.h"

struct Unit {
  const char* name;
  bool supported;
  Kernel (*find)(const Layout&);
};

// Best first.
const std::vector<Unit>& units() {
  static const std::vector<Unit> all = {
#ifdef INFINITY_HAVE_AVX
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
       avx512_unit::find_kernel},
      {"avx2",
       __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c"),
       avx2_unit::find_kernel},
#endif
#ifdef INFINITY_HAVE_NEON
      {"neon", true, neon_unit::find_kernel},  // aarch64 has no processor without it
#endif
      {"scalar", true, scalar_unit::find_kernel},
  };
  return all;
}

// Read anew each time, so that tests and users can compare units within one process.
const Unit& chosen_unit() {
  const char* wanted = std::getenv("INFINITY_SIMD");
  const bool any = !wanted || !*wanted || !std::strcmp(wanted, "auto");
  for (const Unit& unit : units())
    if (unit.supported && (any || !std::strcmp(unit.name, wanted))) return unit;
  std::string have;
  for (const std::string& name : simd_units()) have += (have.empty() ? "" : ", ") + name;
  throw UsageError(
      concat("INFINITY_SIMD=", wanted, " is not one of this processor's units: ", have));
}

}  // namespace

std::string simd_unit() { return chosen_unit().name; }

std::vector<std::string> simd_units() {
  std::vector<std::string> names;
  for (const Unit& unit : units())
    if (unit.supported) names.push_back(unit.name);
  return names;
}

Kernel find_kernel(const Layout& layout) {
  const Kernel kernel = chosen_unit().find(layout);
  INFINITY_REQUIRE(kernel, "no optimizer kernel for this layout (rule ", int(layout.rule),
                   ", weight ", int(layout.weight), ", master ", int(layout.master), ", gradient ",
                   int(layout.grad), ", moments ", int(layout.moments),
                   "): gradients are in the weight's dtype or fp32, moments in fp32, bf16 or int8");
  return kernel;
}

void encode_moments(const float* values, std::uint8_t* codes, std::uint8_t* scales,
                    std::size_t count, bool sq) {
  const DefaultRounding rounding;  // codes pass through subnormals
  using Codes = Int8<Scalar>;
  for (std::size_t begin = 0; begin < count; begin += kMomentBlock) {
    const std::size_t end = std::min(count, begin + kMomentBlock);
    std::int32_t largest = 0;
    for (std::size_t i = begin; i < end; ++i)
      largest = std::max(largest, Scalar::as_int(values[i]) & 0x7FFFFFFF);
    const auto scale = scales[begin / kMomentBlock] = static_cast<std::uint8_t>(largest >> 23);
    const auto power = Codes::power(scale, sq ? Codes::kExpAvgSqField : Codes::kExpAvgField, -1);
    for (std::size_t i = begin; i < end; ++i)
      sq ? Codes::encode_exp_avg_sq(codes + i, power, values[i], Codes::kNearest)
         : Codes::encode_exp_avg(codes + i, power, values[i], Codes::kNearest);
  }
}

void decode_moments(const std::uint8_t* codes, const std::uint8_t* scales, float* values,
                    std::size_t count, bool sq) {
  const DefaultRounding rounding;  // codes pass through subnormals
  using Codes = Int8<Scalar>;
  for (std::size_t i = 0; i < count; ++i) {
    const auto power =
        Codes::power(scales[i / kMomentBlock], sq ? Codes::kExpAvgSqField : Codes::kExpAvgField, 1);
    values[i] =
        sq ? Codes::decode_exp_avg_sq(codes + i, power) : Codes::decode_exp_avg(codes + i, power);
  }
}

void split_master(const float* master, std::uint16_t* weight, std::uint16_t* low,
                  std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) Scalar::store_split(weight + i, low + i, master[i]);
}

void join_master(const std::uint16_t* weight, const std::uint16_t* low, float* master,
                 std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) master[i] = Scalar::load_split(weight + i, low + i);
}

}  // namespace infinity
