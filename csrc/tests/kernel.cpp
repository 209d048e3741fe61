// The optimizer kernels: every unit gives the bits of the scalar one, special numbers included.
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "optim/kernel.h"
#include "tests/random.h"
#include "tests/test.h"

namespace infinity::tests {
namespace {

constexpr std::size_t kCount = 1003;  // leaves a tail in every unit
constexpr int kRoles = 7;

// Infinities, NaNs of several payloads, both zeros, subnormals, the largest and smallest numbers of
// each dtype.
const std::vector<std::uint32_t> kSpecial32 = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF,
    0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF,
    0x3F800000, 0x33000000, 0x477FF000, 0x38800000, 0x387FF000, 0x33000001, 0x477FEFFF};
const std::vector<std::uint32_t> kSpecialBf16 = {0x0000, 0x8000, 0x0001, 0x8001, 0x007F,
                                                 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80,
                                                 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF, 0x3F80};
const std::vector<std::uint32_t> kSpecialF16 = {0x0000, 0x8000, 0x0001, 0x8001, 0x03FF,
                                                0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00,
                                                0x7E00, 0xFE01, 0x7C01, 0xFFFF, 0x3C00};

using Bytes = std::vector<std::uint8_t>;

bool is_nan(DType dtype, std::uint32_t word) {
  if (dtype == DType::kInt8) return false;
  if (dtype == DType::kFloat32) return (word & 0x7FFFFFFF) > 0x7F800000;
  return (word & 0x7FFF) > (dtype == DType::kBFloat16 ? 0x7F80 : 0x7C00);
}

// One array per role: any bits, with a special number at every third place. 8-bit moments take an
// exponent from the largest word of their block, a NaN's too: what steps those has `numbers` only.
Bytes random_array(DType dtype, bool numbers, Random& random) {
  Bytes bytes(kCount * element_nbytes(dtype));
  if (dtype == DType::kInt8) {
    for (std::uint8_t& code : bytes) code = static_cast<std::uint8_t>(random.word());
    return bytes;
  }
  const auto& special = dtype == DType::kFloat32    ? kSpecial32
                        : dtype == DType::kBFloat16 ? kSpecialBf16
                                                    : kSpecialF16;
  for (std::size_t i = 0; i < kCount; ++i) {
    std::uint32_t word = static_cast<std::uint32_t>(random.word());
    const std::size_t what = random.below(3);
    if (what == 0) {
      word = special[random.below(special.size())];
    } else if (what == 1) {  // about one in size, of either sign
      const float value = static_cast<float>(random.below(1 << 20)) * 0x1p-18f - 2.0f;
      std::memcpy(&word, &value, 4);
      if (dtype != DType::kFloat32) word = word >> 16;
      if (dtype == DType::kFloat16) word = (word & 0x83FF) | 0x3800;
    }
    if (dtype != DType::kFloat32) word &= 0xFFFF;
    if (numbers && is_nan(dtype, word)) word = special[0];
    std::memcpy(&bytes[i * element_nbytes(dtype)], &word, element_nbytes(dtype));
  }
  return bytes;
}

struct State {
  Bytes arrays[kRoles];
  Bytes scales[2];  // of 8-bit moments
};

// Of weight, master, two moments, gradient, the other moments. The low half of a split master is
// any 16 bits, as a bf16 is.
std::array<DType, kRoles> dtypes_of(const Layout& layout) {
  const DType master = layout.master == Master::kSplit ? DType::kBFloat16 : DType::kFloat32;
  return {layout.weight, master,         layout.moments, layout.moments,
          layout.grad,   layout.moments, layout.moments};
}

State random_state(const Layout& layout, Random& random) {
  State state;
  const auto dtypes = dtypes_of(layout);
  const bool blocks = layout.moments == DType::kInt8;
  for (int role = 0; role < kRoles; ++role)
    state.arrays[role] = random_array(dtypes[role], blocks, random);
  for (Bytes& scales : state.scales)
    for (std::size_t i = 0; i < kCount; i += kMomentBlock)
      scales.push_back(static_cast<std::uint8_t>(random.below(200)));
  return state;
}

State stepped(const std::string& unit, const Layout& layout, State state,
              const Constants& constants) {
  setenv("INFINITY_SIMD", unit.c_str(), 1);
  const Kernel kernel = find_kernel(layout);
  auto& [a, scales] = state;
  const Arrays arrays = {a[0].data(), a[1].data(), a[4].data(),      a[2].data(),     a[3].data(),
                         a[5].data(), a[6].data(), scales[0].data(), scales[1].data()};
  kernel.step(arrays, 0, kCount, constants);
  return state;
}

std::vector<Layout> all_layouts() {
  std::vector<Layout> layouts;
  setenv("INFINITY_SIMD", "scalar", 1);
#define INFINITY_RULE(Name, NAME) Rule::k##Name,
  for (Rule rule : {INFINITY_OFTEN_USED(INFINITY_RULE) INFINITY_SELDOM_USED(INFINITY_RULE)})
#undef INFINITY_RULE
    for (DType weight : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      for (Master master : {Master::kOwn, Master::kSplit, Master::kFloat32})
        for (DType grad : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
          for (DType moments : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8}) {
            const Layout layout{rule, weight, master, grad, moments};
            try {
              find_kernel(layout);
              layouts.push_back(layout);
            } catch (const UsageError&) {  // nobody defined this combination
            }
          }
  return layouts;
}

// Walks every branch of every rule.
std::vector<Hyperparameters> all_settings() {
  std::vector<Hyperparameters> all(4);
  all[0].lr = 0.1;
  all[1].weight_decay = 0.1, all[1].momentum = 0.9, all[1].step = 2, all[1].grad_factors = {0.37f};
  all[2].lr = 0.3, all[2].beta1 = 0.4, all[2].beta2 = 0.5, all[2].maximize = true,
  all[2].momentum = 0.9;
  all[2].nesterov = true, all[2].grad_factors = {0.37f, 1.0f / 3, 65536.0f, 0.9f};
  all[3].beta1 = 0, all[3].beta2 = 0, all[3].eps = 0, all[3].momentum = 0.5, all[3].dampening = 0.3,
  all[3].step = 7;
  all[1].decoupled = all[1].centered = all[2].amsgrad = all[3].amsgrad = all[3].centered = true;
  all[2].mu = 0.5, all[2].lambd = 0.3;
  all[2].momentum_decay = 0.004, all[3].mu_product = 0.25;
  all[1].alpha = 5, all[1].fixed_decay = true, all[2].beta3 = 0.3, all[3].alpha = 2;
  all[0].fresh = all[2].fresh = true;
  for (Hyperparameters& each : all) each.eta = 0.1, each.smallest = 1e-6, each.largest = 50;
  return all;
}

TEST(kernel, units_agree) {
  // Steps ordinary, random and special bits with every unit, in every layout, and compares with the
  // scalar unit.
  Random random(31);
  const std::vector<Layout> layouts = all_layouts();
  CHECK(layouts.size() > 50, layouts.size());
  for (const std::string& unit : simd_units()) std::printf("unit %s\n", unit.c_str());
  for (const Layout& layout : layouts)
    for (const Hyperparameters& hyper : all_settings()) {
      const Constants constants = prepare(layout.rule, hyper);
      const State before = random_state(layout, random);
      const State expected = stepped("scalar", layout, before, constants);
      CHECK(expected.arrays[0] != before.arrays[0], "the twin: the step did nothing");
      CHECK(expected.arrays[4] == before.arrays[4], "the gradient was changed");
      for (const std::string& unit : simd_units()) {
        const State found = stepped(unit, layout, before, constants);
        for (int role = 0; role < kRoles; ++role)
          CHECK(found.arrays[role] == expected.arrays[role], unit, ", role ", role, ", rule ",
                int(layout.rule), ", weight ", int(layout.weight), ", master ", int(layout.master),
                ", grad ", int(layout.grad), ", moments ", int(layout.moments));
        CHECK(found.scales[0] == expected.scales[0] && found.scales[1] == expected.scales[1], unit,
              ", scales");
      }
    }
}

TEST(kernel, split_masters_join_to_what_they_were) {
  // Splits and joins special and random words: every bit but those of a NaN's payload comes back.
  Random random(32);
  std::vector<std::uint32_t> words = kSpecial32;
  while (words.size() < 10'000) words.push_back(static_cast<std::uint32_t>(random.word()));
  const std::size_t count = words.size();
  std::vector<float> masters(count), joined(count);
  std::memcpy(masters.data(), words.data(), count * 4);
  std::vector<std::uint16_t> weights(count), low(count);
  split_master(masters.data(), weights.data(), low.data(), count);
  join_master(weights.data(), low.data(), joined.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t found;
    std::memcpy(&found, &joined[i], 4);
    const bool nan = (words[i] & 0x7FFFFFFF) > 0x7F800000;
    CHECK(found == (nan ? (words[i] & 0x80000000) | 0x7FC00000 : words[i]), in_hex(words[i]),
          " became ", in_hex(found));
  }
}

TEST(kernel, what_nobody_defined_is_refused) {
  // A layout without a kernel, a step 0, five gradient factors, a unit that no processor has.
  setenv("INFINITY_SIMD", "scalar", 1);
  said_by<UsageError>([] { find_kernel({Rule::kAdamW, DType::kFloat32, Master::kSplit}); });
  Hyperparameters hyper;
  hyper.step = 0;
  CHECK(said_by<UsageError>([&] { prepare(Rule::kSgd, hyper); }).find("not 0") !=
        std::string::npos);
  hyper.step = 1;
  hyper.grad_factors.resize(kMaxGradFactors + 1);
  said_by<UsageError>([&] { prepare(Rule::kSgd, hyper); });
  setenv("INFINITY_SIMD", "mmx", 1);
  CHECK(said_by<UsageError>([] { simd_unit(); }).find("scalar") != std::string::npos);
}

}  // namespace
}  // namespace infinity::tests
