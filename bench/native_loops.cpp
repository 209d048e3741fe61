// The loops of the native core under Google Benchmark: `make bench-native`. `--folder=DIR` names
// the disk to measure.
//
//   RULE/MASTER/MOMENTS/SIZE   one step of an optimizer's kernel, on one thread, over arrays that a
//       cache or only memory holds. Bytes are those read and written, without the scales of 8-bit
//       moments
//   .../memory/ceiling         move_streams over the same arrays. In a cache it is no ceiling: its
//       own loop takes longer than the bytes
//   crc/...                    checksums
//   queue/..., ticket/...      a job or a transfer of one block, submitted and waited for
//   pool/...                   a lease, taken and given back
//   file/...                   one file, read or written by an engine's block and depth
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/rounding.h"
#include "base/thread_pool.h"
#include "base/work_queue.h"
#include "bench/traffic.h"
#include "io/engine.h"
#include "memory/pool.h"
#include "memory/region.h"
#include "optim/kernel.h"
#include "tests/doubles/doubles.h"

namespace portable {  // tests/portable_crc32c.cpp
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t seed);
}

namespace infinity {
namespace {

using benchmark::State;

constexpr std::size_t kKib = 1024, kMib = 1024 * kKib;

std::string folder = "build";

// An error of the engine ends its benchmark, and no other one.
template <class Run>
benchmark::internal::Benchmark* add(const std::string& name, Run run) {
  return benchmark::RegisterBenchmark(name.c_str(), [run](State& state) {
    try {
      run(state);
    } catch (const std::exception& error) {
      state.SkipWithError(error.what());
    }
  });
}

// Of work that other threads do: by wall-clock time.
template <class Run>
void add_waiting(const std::string& name, Run run) {
  add(name, run)->UseRealTime();
}

std::string size_name(std::size_t nbytes) {
  if (nbytes % kMib == 0) return concat(nbytes / kMib, "MiB");
  return nbytes % kKib == 0 ? concat(nbytes / kKib, "KiB") : concat(nbytes, "B");
}

void count(State& state, std::size_t items, std::size_t nbytes) {
  const auto turns = static_cast<std::int64_t>(state.iterations());
  state.SetItemsProcessed(turns * static_cast<std::int64_t>(items));
  if (nbytes != 0) state.SetBytesProcessed(turns * static_cast<std::int64_t>(nbytes));
}

// --- kernels ---

// For every rule: no division by zero.
Hyperparameters settings() {
  Hyperparameters hyper;
  hyper.step = 100;
  hyper.weight_decay = 0.01, hyper.momentum = 0.9, hyper.amsgrad = true;
  hyper.momentum_decay = 4e-3, hyper.mu_product = 0.25;
  hyper.lambd = 1e-4, hyper.eta = 0.01, hyper.mu = 0.5, hyper.alpha = 5;
  hyper.smallest = 1e-6, hyper.largest = 50;
  return hyper;
}

// The arrays of one layout, each in memory of its own.
class Arrayed {
 public:
  Arrayed(const Layout& layout, std::size_t count)
      : count_(count), kernel_(find_kernel(layout)), constants_(prepare(layout.rule, settings())) {
    const std::size_t weight = element_nbytes(layout.weight);
    arrays_.weight = add(weight, layout.master != Master::kFloat32, true);
    fill(arrays_.weight, layout.weight, 0.02f);
    if (layout.master != Master::kOwn) {
      const bool split = layout.master == Master::kSplit;
      arrays_.master = add(split ? 2 : 4, true, true);
      if (!split) fill(arrays_.master, DType::kFloat32, 0.02f);
    }
    void* grad = add(element_nbytes(layout.grad), true, false);
    fill(grad, layout.grad, 1e-3f);
    arrays_.grad = grad;
    const Uses uses = kernel_.uses(constants_);
#define INFINITY_ARRAY(name, role, of_state) \
  if (uses.name) arrays_.name = add(element_nbytes(layout.moments), true, true);
    INFINITY_MOMENTS(INFINITY_ARRAY)
#undef INFINITY_ARRAY
    if (layout.moments != DType::kInt8) return;
    scales_.resize(2, std::vector<std::uint8_t>(count / kMomentBlock));
    arrays_.exp_avg_scale = scales_[0].data();
    arrays_.exp_avg_sq_scale = scales_[1].data();
  }

  void step() const { kernel_.step(arrays_, 0, count_, constants_); }
  void move() const { move_streams(streams_, count_, 1); }
  std::size_t count() const { return count_; }
  std::size_t nbytes() const {  // read, and written
    std::size_t total = 0;
    for (const Stream& stream : streams_)
      total += count_ * stream.element_nbytes * (stream.read + stream.written);
    return total;
  }

 private:
  void* add(std::size_t element_nbytes, bool read, bool written) {
    regions_.push_back(std::make_unique<Region>(count_ * element_nbytes, true, 1));
    streams_.push_back({regions_.back()->data(), element_nbytes, read, written});
    return regions_.back()->data();
  }

  // Numbers of both signs around `size`.
  void fill(void* array, DType dtype, float size) const {
    std::uint32_t word = 1;
    for (std::size_t i = 0; i < count_; ++i) {
      word = word * 1664525u + 1013904223u;
      const float value = size * (static_cast<float>(word >> 8) * 0x1p-23f - 1.0f);
      if (dtype == DType::kFloat32)
        static_cast<float*>(array)[i] = value;
      else  // the upper half: a bfloat16
        std::memcpy(static_cast<std::uint16_t*>(array) + i,
                    reinterpret_cast<const char*>(&value) + 2, 2);
    }
  }

  const std::size_t count_;
  const Kernel kernel_;
  const Constants constants_;
  std::vector<std::unique_ptr<Region>> regions_;
  std::vector<Stream> streams_;
  std::vector<std::vector<std::uint8_t>> scales_;
  Arrays arrays_;
};

// A benchmark and its ceiling ask for the same arrays several times. They are kept until
// another layout or size is asked for.
const Arrayed& arrayed(const std::string& name, const Layout& layout, std::size_t count) {
  static std::string kept_name;
  static std::unique_ptr<Arrayed> kept;
  if (kept_name != name) {
    kept.reset();
    kept = std::make_unique<Arrayed>(layout, count);
    kept_name = name;
  }
  return *kept;
}

void add_kernels() {
  struct Form {
    const char* name;
    Layout layout;
  };
  const DType fp32 = DType::kFloat32, bf16 = DType::kBFloat16, int8 = DType::kInt8;
  const Form forms[] = {
      {"own/fp32", {Rule{}, fp32, Master::kOwn, fp32, fp32}},
      {"own/int8", {Rule{}, fp32, Master::kOwn, fp32, int8}},
      {"split/fp32", {Rule{}, bf16, Master::kSplit, bf16, fp32}},
      {"split/bf16", {Rule{}, bf16, Master::kSplit, bf16, bf16}},
      {"split/int8", {Rule{}, bf16, Master::kSplit, bf16, int8}},
      {"fp32/fp32", {Rule{}, bf16, Master::kFloat32, bf16, fp32}},
  };
  // Elements. The first stay in a core's second cache, the others in no cache.
  const std::pair<const char*, std::size_t> sizes[] = {{"cache", 16 * kKib}, {"memory", 8 * kMib}};
#define INFINITY_RULE(Name, NAME) {#NAME, Rule::k##Name},
  const std::pair<std::string, Rule> rules[] = {INFINITY_OFTEN_USED(INFINITY_RULE)
                                                    INFINITY_SELDOM_USED(INFINITY_RULE)};
#undef INFINITY_RULE
  for (auto [rule_name, rule] : rules) {
    for (char& letter : rule_name) letter |= 'a' ^ 'A';
    for (auto [form_name, layout] : forms) {
      layout.rule = rule;
      const Uses uses = find_kernel(layout).uses(prepare(rule, settings()));
      if (layout.moments == int8 && !uses.has_scales()) continue;
      for (const auto& [size, count_of] : sizes) {
        const std::string name = concat(rule_name, '/', form_name, '/', size);
        using Loop = void (Arrayed::*)() const;
        const auto add_loop = [&, layout = layout, elements = count_of](const char* end,
                                                                        Loop loop) {
          add(name + end, [=](State& state) {
            const DefaultRounding rounding;
            const Arrayed& arrays = arrayed(name, layout, elements);
            (arrays.*loop)();
            for (auto _ : state) (arrays.*loop)();
            count(state, arrays.count(), arrays.nbytes());
          });
        };
        add_loop("", &Arrayed::step);
        if (count_of > sizes[0].second) add_loop("/ceiling", &Arrayed::move);
      }
    }
  }
}

// --- checksums ---

void add_checksums() {
  using Checksum = std::uint32_t (*)(const void*, std::size_t, std::uint32_t);
  const std::pair<const char*, Checksum> kinds[] = {{"crc/hardware/", crc32c},
                                                    {"crc/portable/", portable::crc32c}};
  for (const auto& [kind, checksum] : kinds)
    for (std::size_t nbytes : {std::size_t{64}, 4 * kKib, kChecksumNbytes, kMib, 64 * kMib})
      add(kind + size_name(nbytes), [nbytes, checksum = checksum](State& state) {
        const std::vector<std::byte> bytes(nbytes, std::byte{7});
        for (auto _ : state) benchmark::DoNotOptimize(checksum(bytes.data(), nbytes, 0));
        count(state, 1, nbytes);
      });
  for (std::size_t nbytes : {kChecksumNbytes, std::size_t{1} << 30})
    add("crc/combine/" + size_name(nbytes), [nbytes](State& state) {
      std::uint32_t sum = 1;
      for (auto _ : state) benchmark::DoNotOptimize(sum = crc32c_before(sum, nbytes));
      count(state, 1, 0);
    });
}

// --- queues and pools ---

void add_queues() {
  add_waiting("queue/work", [](State& state) {
    WorkQueue queue(1);
    for (auto _ : state) {
      const auto ticket = std::make_shared<Ticket>(1);
      queue.add([ticket] { ticket->part_done(); }, true);
      ticket->wait();
    }
    count(state, 1, 0);
  });
  for (int threads : {1, 2, 4})
    add_waiting(concat("queue/fork_join/threads:", threads), [threads](State& state) {
      ThreadPool pool(threads);
      for (auto _ : state) pool.run([](int part) { benchmark::DoNotOptimize(part); });
      count(state, 1, 0);
    });
  add("ticket/alone", [](State& state) {
    for (auto _ : state) {
      const auto ticket = std::make_shared<Ticket>(1);
      ticket->part_done();
      ticket->wait();
    }
    count(state, 1, 0);
  });
}

void add_pools() {
  // Beside `held` leases with holes between them, all too short.
  for (std::size_t held : {0, 100, 10'000})
    add(concat("pool/lease/held:", held), [held](State& state) {
      const std::size_t block = kBlockNbytes;
      const auto pool =
          std::make_shared<PinnedPool>(std::make_shared<Region>((2 * held + 2) * block, false, 0));
      std::deque<Lease> leases;
      for (std::size_t i = 0; i < 2 * held; ++i) leases.push_back(pool->try_lease(block));
      for (std::size_t i = 0; i < leases.size(); i += 2) leases[i].release();
      for (auto _ : state) {
        Lease lease = pool->try_lease(2 * block);
        INFINITY_CHECK(lease, "the pool is full");
        lease.release();
      }
      count(state, 1, 0);
    });
}

// --- files ---

// An engine with one file, which is gone with it, and memory for all of the file.
struct Disk {
  Disk(const IoOptions& options, std::size_t nbytes)
      : memory(std::make_shared<Region>(nbytes, true, 1)),
        engine(options),
        file(engine.create_swap_file(folder, nbytes)) {
    engine.register_files_and_buffers({span()}, {memory});
    move(Op::kWrite);  // the kernel reads space that was only reserved without its disk
  }
  Span span() const { return {memory->data(), memory->nbytes()}; }
  void move(Op op) { engine.submit({{op, file, 0, span()}})->wait(); }

  const std::shared_ptr<Region> memory;
  IoEngine engine;
  const int file;
};

constexpr const char* kKinds[] = {"uring", "threads"};

void add_files() {
  const auto add_ticket = [](const char* name, const IoOptions& options) {
    add_waiting(concat("ticket/submit_wait/", name), [options](State& state) {
      Disk disk(options, kBlockNbytes);
      for (auto _ : state) disk.move(Op::kRead);
      count(state, 1, kBlockNbytes);
    });
  };
  IoOptions options;
  const auto doubles = std::make_shared<doubles::Doubles>();
  doubles->instant = true;
  options.layer = doubles;
  add_ticket("instant", options);  // the engine's own part: no transfer at all
  options.layer = nullptr;
  for (const char* kind : kKinds) {
    options.kind = kind;
    add_ticket(kind, options);
  }
  for (Op op : {Op::kRead, Op::kWrite})
    for (const char* kind : kKinds)
      for (std::size_t block : {64 * kKib, kMib, 4 * kMib})
        for (unsigned depth : {1, 8, 64}) {
          options.kind = kind;
          options.block_nbytes = block;
          options.depth = depth;
          const std::string name = concat("file/", op == Op::kRead ? "read/" : "write/", kind,
                                          "/block:", size_name(block), "/depth:", depth);
          add_waiting(name, [=](State& state) {
            Disk disk(options, 64 * kMib);
            for (auto _ : state) disk.move(op);
            count(state, 64 * kMib / block, 64 * kMib);
          });
        }
}

// Takes `--folder=DIR` out of the arguments.
void take_folder(int& argc, char** argv) {
  const std::string flag = "--folder=";
  int kept = 0;
  for (int i = 0; i < argc; ++i)
    if (std::strncmp(argv[i], flag.c_str(), flag.size()) == 0)
      folder = argv[i] + flag.size();
    else
      argv[kept++] = argv[i];
  argc = kept;
}

}  // namespace
}  // namespace infinity

int main(int argc, char** argv) {
  infinity::take_folder(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("simd", infinity::simd_unit());
  infinity::add_kernels();
  infinity::add_checksums();
  infinity::add_queues();
  infinity::add_pools();
  infinity::add_files();
  benchmark::RunSpecifiedBenchmarks();
}
