// The updater: the same bits whatever the homes, slots, cuts and threads; ordered; dead after its
// first error.
#include <algorithm>
#include <array>
#include <map>

#include "tests/disk.h"
#include "tests/scarce.h"
#include "update/updater.h"

namespace infinity::tests {
namespace {

// elements: what chunks are cut at, twice as many with 8-bit moments
constexpr std::size_t kGrain = 32 * 1024;
constexpr std::size_t kCount = 4 * kGrain + 4096;  // five chunks at most
constexpr int kRoles = 7;

const Layout kSplitAdam{Rule::kAdamW, DType::kBFloat16, Master::kSplit, DType::kBFloat16,
                        DType::kFloat32};
const Layout kOwnAdam{Rule::kAdam, DType::kFloat32, Master::kOwn, DType::kFloat32,
                      DType::kBFloat16};
const Layout kHalfLion{Rule::kLion, DType::kFloat16, Master::kFloat32, DType::kFloat32,
                       DType::kFloat32};
const Layout kByteAdam{Rule::kAdamW, DType::kBFloat16, Master::kSplit, DType::kBFloat16,
                       DType::kInt8};
const Layout kCentred{Rule::kRMSprop, DType::kBFloat16, Master::kSplit, DType::kBFloat16,
                      DType::kBFloat16};
const Layout kHalfAdan{Rule::kAdan, DType::kBFloat16, Master::kSplit, DType::kBFloat16,
                       DType::kBFloat16};
const Layout kPlainSgd{Rule::kSgd, DType::kFloat32, Master::kOwn, DType::kFloat32, DType::kFloat32};

std::array<std::size_t, kRoles> sizes_of(const Layout& layout) {
  const bool adam = layout.rule == Rule::kAdamW || layout.rule == Rule::kAdam;
  const std::size_t master = layout.master == Master::kOwn     ? 0
                             : layout.master == Master::kSplit ? 2
                                                               : 4;
  const std::size_t moment = element_nbytes(layout.moments);
  const bool adan = layout.rule == Rule::kAdan;
  const bool centred = layout.rule == Rule::kRMSprop || adan;
  return {element_nbytes(layout.weight),
          master,
          moment,
          adam || centred ? moment : 0,
          element_nbytes(layout.grad),
          centred ? moment : 0,
          adan ? moment : 0};
}

// Values about one in size, of the array's dtype; second moments are positive.
void fill(Span span, DType dtype, bool positive, Random& random) {
  if (dtype == DType::kInt8) return random.fill(span);
  for (std::size_t at = 0; at < span.nbytes; at += element_nbytes(dtype)) {
    const float value =
        static_cast<float>(random.below(1 << 20)) * 0x1p-19f - (positive ? 0.0f : 1.0f);
    std::uint32_t word;
    std::memcpy(&word, &value, 4);
    if (dtype != DType::kFloat32) word >>= 16;
    if (dtype == DType::kFloat16) word = (word & 0x83FF) | 0x3400;
    std::memcpy(span.data + at, &word, element_nbytes(dtype));
  }
}

// One unit: its arrays, their contents in memory, and their homes there or in the disk's file.
class Unit {
 public:
  Unit(const Layout& layout, std::uint64_t seed, std::size_t count = kCount)
      : layout_(layout), count_(count) {
    Random random(seed);
    const DType dtypes[kRoles] = {
        layout.weight,  layout.master == Master::kSplit ? DType::kBFloat16 : DType::kFloat32,
        layout.moments, layout.moments,
        layout.grad,    layout.moments,
        layout.moments};
    for (int role = 0; role < kRoles; ++role) {
      const std::size_t nbytes = sizes_of(layout)[role] * count;
      if (nbytes == 0) continue;
      memory_[role] = std::make_unique<Memory>(nbytes);
      fill(memory_[role]->span, dtypes[role], role == 3, random);
      homes_[role] = std::make_shared<Extent>(Extent::in_memory(memory_[role]->span));
    }
    if (layout.moments != DType::kInt8) return;
    for (int moment = 0; moment < 2; ++moment) {
      scale_memory_[moment] = std::make_unique<Memory>(count / kMomentBlock);
      std::memset(scale_memory_[moment]->span.data, 120, count / kMomentBlock);
      scales_[moment] = std::make_shared<Extent>(Extent::in_memory(scale_memory_[moment]->span));
    }
  }

  // Moves the arrays whose bit is set in `roles` into the file, from `offset` on. With `sums` they
  // have tables.
  void move_to(const Disk& disk, std::uint64_t offset = 0, unsigned roles = 0x7F,
               const std::shared_ptr<SumCache>& sums = nullptr) {
    for (int role = 0; role < kRoles; ++role) {
      if (!memory_[role] || !(roles >> role & 1)) continue;
      const Span span = memory_[role]->span;
      homes_[role] = std::make_shared<Extent>(
          Extent::in_volume(Volume::of(disk.file), offset, span.nbytes, sums));
      homes_[role]->remember(0, span, *disk.engine);
      wait(disk.engine->submit(homes_[role]->requests(Op::kWrite, 0, span)));
      offset += span.nbytes + (sums ? SumTable::nbytes_of(span.nbytes) : 0);
    }
  }

  UnitUpdate update(std::vector<Run> runs, std::uint64_t version = 1,
                    TicketPtr after = nullptr) const {
    UnitUpdate update;
    update.layout = layout_;
    update.count = count_;
    std::shared_ptr<Extent>* const extents[] = {
        &update.weight, &update.master,   &update.exp_avg, &update.exp_avg_sq,
        &update.grad,   &update.moment_3, &update.moment_4};
    for (int role = 0; role < kRoles; ++role) *extents[role] = homes_[role];
    update.exp_avg_scale = scales_[0];
    update.exp_avg_sq_scale = scales_[1];
    update.runs = std::move(runs);
    update.version = version;
    update.after = std::move(after);
    return update;
  }
  UnitUpdate update(const Hyperparameters& hyper, std::uint64_t version = 1,
                    TicketPtr after = nullptr) const {
    return update(std::vector<Run>{{0, count_, hyper}}, version, std::move(after));
  }

  // The bytes at home, verified.
  std::vector<std::string> contents(IoEngine* engine) const {
    std::vector<std::string> found;
    for (int role = 0; role < kRoles; ++role) {
      if (!memory_[role]) continue;
      if (!homes_[role]->is_file()) {
        found.push_back(memory_[role]->bytes());
        continue;
      }
      const Memory target(homes_[role]->nbytes());
      wait(engine->submit(homes_[role]->requests(Op::kRead, 0, target.span)));
      homes_[role]->verify(0, target.span, *engine);
      found.push_back(target.bytes());
    }
    for (const auto& scales : scale_memory_)
      if (scales) found.push_back(scales->bytes());
    return found;
  }

  // What the update of another unit is to leave here.
  Shadow shadow() const {
    const UnitUpdate from = update(std::vector<Run>{});
    Shadow to;
    to.weight = from.weight, to.master = from.master;
#define INFINITY_SET(name, role, of_state) to.name = from.name;
#define INFINITY_SET_SCALE(name, role, of_state) to.name##_scale = from.name##_scale;
    INFINITY_MOMENTS(INFINITY_SET)
    INFINITY_SCALED_MOMENTS(INFINITY_SET_SCALE)
#undef INFINITY_SET
#undef INFINITY_SET_SCALE
    return to;
  }

  // The same without the gradient: what a step changes.
  std::vector<std::string> state(IoEngine* engine) const {
    std::vector<std::string> found = contents(engine);
    const auto before_it =
        std::count_if(memory_, memory_ + 4, [](const auto& each) { return bool(each); });
    found.erase(found.begin() + before_it);
    return found;
  }

  const Extent& home(int role) const { return *homes_[role]; }
  std::size_t element_nbytes_in_file() const {
    std::size_t sum = 0;
    for (int role = 0; role < kRoles; ++role)
      if (memory_[role] && homes_[role]->is_file()) sum += sizes_of(layout_)[role];
    return sum;
  }

 private:
  Layout layout_;
  std::size_t count_;
  std::unique_ptr<Memory> memory_[kRoles];
  std::shared_ptr<Extent> homes_[kRoles];
  std::unique_ptr<Memory> scale_memory_[2];
  std::shared_ptr<Extent> scales_[2];
};

// An updater with its slots, each for `grains` times kGrain elements of `element_nbytes`.
struct Steps {
  Steps(const Disk& disk, int slot_count, int threads, std::size_t element_nbytes,
        std::size_t grains = 1)
      : slots(std::max<std::size_t>(1, slot_count * grains * kGrain * element_nbytes)),
        updater(disk.engine, slots.span, slot_count, threads) {}
  Memory slots;
  Updater updater;
};

Hyperparameters hyper_of(std::int64_t step) {
  Hyperparameters hyper;
  hyper.lr = 0.01 * static_cast<double>(step);
  hyper.weight_decay = 0.1;
  hyper.momentum = 0.9;
  hyper.centered = true;
  hyper.step = step;
  hyper.grad_factors = {0.37f};
  return hyper;
}

// Two steps at home in memory by one thread: what every other way must give.
std::vector<std::string> expected_of(const Layout& layout, std::uint64_t seed) {
  const Disk disk("threads");
  const Unit unit(layout, seed);
  Steps steps(disk, 0, 1, 0);
  for (int step = 1; step <= 2; ++step)
    wait(steps.updater.submit(unit.update(hyper_of(step), step)));
  return unit.contents(nullptr);
}

TEST_OF_BACKENDS(update, homes_slots_cuts_and_threads_do_not_change_bits) {
  // Two steps over file extents, with one to five chunks, one to four slots and one to three
  // threads, against memory.
  std::uint64_t seed = 101;
  for (const Layout& layout :
       {kSplitAdam, kOwnAdam, kHalfLion, kPlainSgd, kByteAdam, kCentred, kHalfAdan}) {
    const std::size_t grain = layout.moments == DType::kInt8 ? 2 : 1;
    const auto expected = expected_of(layout, ++seed);
    CHECK(expected != Unit(layout, seed).contents(nullptr), "the twin: the steps did nothing");
    struct Cut {
      int slots, threads;
      std::size_t grains;
    };
    for (const Cut& cut : {Cut{1, 1, 1}, Cut{2, 2, 1}, Cut{4, 1, 1}, Cut{3, 3, 2}, Cut{1, 2, 5}}) {
      const Disk disk(kind, nullptr, 16 * kBlockNbytes);
      Unit unit(layout, seed);
      unit.move_to(disk);
      Steps steps(disk, cut.slots, cut.threads, unit.element_nbytes_in_file(), grain * cut.grains);
      for (int step = 1; step <= 2; ++step)
        wait(steps.updater.submit(unit.update(hyper_of(step), step)));
      CHECK(unit.contents(disk.engine.get()) == expected, cut.slots, " slots of ", cut.grains,
            " grains, ", cut.threads, " threads, rule ", int(layout.rule));
      CHECK(unit.home(0).version() == 2 && unit.home(4).version() == 0);
      CHECK(steps.updater.totals().elements == 2 * kCount);
    }
  }
}

TEST_OF_BACKENDS(update, any_array_may_be_at_home_anywhere) {
  // All 32 choices of which of the five arrays live in the file.
  const auto expected = expected_of(kSplitAdam, 111);
  for (unsigned roles = 0; roles < 32; ++roles) {
    const Disk disk(kind);
    Unit unit(kSplitAdam, 111);
    unit.move_to(disk, 0, roles);
    Steps steps(disk, 2, 2, std::max<std::size_t>(2, unit.element_nbytes_in_file()));
    for (int step = 1; step <= 2; ++step)
      wait(steps.updater.submit(unit.update(hyper_of(step), step)));
    CHECK(unit.contents(disk.engine.get()) == expected, "roles ", roles);
  }
}

TEST_OF_BACKENDS(update, faults_that_must_not_show_do_not) {
  // Short, late and reordered transfers below two steps.
  FaultPlan plan = fault_plan(112);
  plan.short_transfer = 0.4, plan.delay = 0.02, plan.reorder = 0.3;
  const Disk disk(kind, &plan, 4 * kBlockNbytes);
  Unit unit(kSplitAdam, 112);
  unit.move_to(disk);
  Steps steps(disk, 3, 2, unit.element_nbytes_in_file());
  for (int step = 1; step <= 2; ++step)
    wait(steps.updater.submit(unit.update(hyper_of(step), step)));
  CHECK(unit.contents(disk.engine.get()) == expected_of(kSplitAdam, 112));
}

TEST_OF_BACKENDS(update, checksums_on_the_disk_do_not_change_bits) {
  // Arrays with tables, of which one or three pages are in memory, below short, late and reordered
  // transfers. The twin: a flipped bit of a weight fails the next step.
  FaultPlan plan = fault_plan(122);
  plan.short_transfer = 0.4, plan.delay = 0.02, plan.reorder = 0.3;
  for (std::size_t pages : {1, 3}) {
    const Disk disk(kind, &plan, 4 * kBlockNbytes);
    Unit unit(kSplitAdam, 122);
    unit.move_to(disk, 0, 0x7F, std::make_shared<SumCache>(pages));
    Steps steps(disk, 3, 2, unit.element_nbytes_in_file());
    for (int step = 1; step <= 2; ++step)
      wait(steps.updater.submit(unit.update(hyper_of(step), step)));
    CHECK(unit.contents(disk.engine.get()) == expected_of(kSplitAdam, 122));
    disk.flip(unit.home(0).offset() + 5);
    thrown_by<CorruptionError>(steps.updater.submit(unit.update(hyper_of(3), 3)));
  }
}

TEST_OF_BACKENDS(update, elements_outside_the_runs_keep_their_bits) {
  // Runs inside one chunk, over a cut, and none at all in two chunks, each with its own
  // hyperparameters.
  const std::vector<Run> runs = {{5, 100, hyper_of(1)},
                                 {kGrain - 3, kGrain + 7, hyper_of(2)},
                                 {kCount - 1, kCount, hyper_of(3)}};
  const Disk disk(kind);
  Unit in_memory(kPlainSgd, 113), in_file(kPlainSgd, 113);
  const auto before = in_memory.contents(nullptr);
  in_file.move_to(disk);
  Steps steps(disk, 2, 2, in_file.element_nbytes_in_file());
  wait(steps.updater.submit(in_memory.update(runs)));
  wait(steps.updater.submit(in_file.update(runs)));
  const auto after = in_memory.contents(nullptr);
  CHECK(after == in_file.contents(disk.engine.get()));
  std::size_t changed = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    const bool inside = std::any_of(runs.begin(), runs.end(),
                                    [&](const Run& run) { return run.begin <= i && i < run.end; });
    const bool same = before[0].compare(4 * i, 4, after[0], 4 * i, 4) == 0;
    CHECK(inside || same, "element ", i);
    changed += !same;
  }
  CHECK(changed > 0);
  // nothing to step is done at once
  wait(steps.updater.submit(in_file.update(std::vector<Run>{})));
  CHECK(after == in_file.contents(disk.engine.get()));
}

TEST_OF_BACKENDS(update, updates_that_share_an_extent_run_one_after_the_other) {
  // Six steps of two units submitted without waiting, results late and reordered, against one at a
  // time; the twin shows that their order matters.
  FaultPlan plan = fault_plan(114);
  plan.delay = 0.02, plan.reorder = 0.4;
  std::map<std::string, std::vector<std::string>> found;
  for (const std::string& way :
       {std::string("waiting"), std::string("at once"), std::string("backwards")}) {
    const Disk disk(kind, &plan, 16 * kBlockNbytes);
    Unit left(kOwnAdam, 114), right(kOwnAdam, 115);
    left.move_to(disk);
    right.move_to(disk, 2 * kMib);
    // room for the next update beside the one before
    Steps steps(disk, 12, 2, left.element_nbytes_in_file());
    std::vector<TicketPtr> tickets;
    for (const Unit* unit : {&left, &right})
      for (int i = 1; i <= 6; ++i) {
        tickets.push_back(
            steps.updater.submit(unit->update(hyper_of(way == "backwards" ? 7 - i : i), i)));
        if (way == "waiting") wait(tickets.back());
      }
    for (const TicketPtr& ticket : tickets) wait(ticket);
    found[way] = left.contents(disk.engine.get());
    for (const std::string& each : right.contents(disk.engine.get())) found[way].push_back(each);
  }
  CHECK(found["at once"] == found["waiting"]);
  CHECK(found["backwards"] != found["waiting"]);
}

TEST_OF_BACKENDS(update, a_shadow_has_the_steps_bits_and_leaves_what_it_was_made_from) {
  // Whole units and a few runs (the rest is copied), at home in the file, in memory or both, over
  // what was there before.
  std::uint64_t seed = 130;
  for (const Layout& layout :
       {kSplitAdam, kOwnAdam, kHalfLion, kPlainSgd, kByteAdam, kCentred, kHalfAdan})
    for (const unsigned in_file : {0x00u, 0x7Fu, 0x76u})
      for (const bool whole : {true, false}) {
        const bool bytes = layout.moments == DType::kInt8;
        const std::vector<Run> runs =
            whole ? std::vector<Run>{{0, kCount, hyper_of(1)}}
                  : std::vector<Run>{{64, 128, hyper_of(1)}, {3 * kGrain, kCount, hyper_of(2)}};
        const Disk disk(kind, nullptr, 16 * kBlockNbytes, 8, 8 * kMib);
        Unit expected(layout, ++seed), source(layout, seed), target(layout, seed + 1000);
        const auto before = source.contents(nullptr);
        source.move_to(disk, 0, in_file);
        target.move_to(disk, 4 * kMib, in_file);
        Steps steps(disk, 3, 2, std::max<std::size_t>(1, source.element_nbytes_in_file()),
                    bytes ? 2 : 1);
        wait(steps.updater.submit(expected.update(runs)));
        UnitUpdate update = source.update(runs, 7);
        update.shadow = target.shadow();
        wait(steps.updater.submit(update));
        CHECK(target.state(disk.engine.get()) == expected.state(nullptr), "rule ", int(layout.rule),
              " in file ", in_file);
        CHECK(source.contents(disk.engine.get()) == before,
              "the shadow changed what it was made from");
        CHECK(target.state(disk.engine.get()) != source.state(disk.engine.get()),
              "the twin: nothing was stepped");
        CHECK(target.home(0).version() == 7 && source.home(0).version() == 0);
      }
}

TEST_OF_BACKENDS(update,
                 a_shadow_of_the_weights_alone_leaves_the_old_ones_and_steps_the_rest_in_place) {
  // Two such steps that change places, at home in the file, in memory or both, against two steps in
  // place; the twin: the weights that the second one left are those of the first.
  std::uint64_t seed = 150;
  for (const Layout& layout :
       {kSplitAdam, kOwnAdam, kHalfLion, kPlainSgd, kByteAdam, kCentred, kHalfAdan})
    for (const unsigned in_file : {0x00u, 0x7Fu, 0x76u}) {
      const Disk disk(kind, nullptr, 16 * kBlockNbytes, 8, 8 * kMib);
      Unit once(layout, ++seed), twice(layout, seed), source(layout, seed),
          beside(layout, seed + 1000);
      source.move_to(disk, 0, in_file);
      beside.move_to(disk, 4 * kMib, in_file);
      Steps steps(disk, 3, 2, std::max<std::size_t>(1, source.element_nbytes_in_file()),
                  layout.moments == DType::kInt8 ? 2 : 1);
      wait(steps.updater.submit(once.update(hyper_of(1))));
      for (int step = 1; step <= 2; ++step)
        wait(steps.updater.submit(twice.update(hyper_of(step))));
      const auto weights = [&](const Unit& unit) { return unit.contents(disk.engine.get())[0]; };
      UnitUpdate update = source.update(hyper_of(1), 1);
      update.shadow.weight = beside.shadow().weight;
      wait(steps.updater.submit(update));
      CHECK(weights(beside) == weights(once) && weights(source) != weights(once), "rule ",
            int(layout.rule), " in file ", in_file);
      std::swap(update.weight, update.shadow.weight);
      update.runs = {{0, kCount, hyper_of(2)}};
      wait(steps.updater.submit(update));
      auto found = source.contents(disk.engine.get());
      CHECK(found == twice.contents(nullptr), "rule ", int(layout.rule), " in file ", in_file);
      CHECK(weights(beside) == weights(once),
            "the second step changed the weights it was made from");
    }
}

TEST_OF_BACKENDS(update, a_shadow_and_what_shares_its_extents_run_one_after_the_other) {
  // A shadow, a step in place of the state that it was made from, and another shadow over the
  // first, without waiting.
  FaultPlan plan = fault_plan(140);
  plan.delay = 0.02, plan.reorder = 0.4;
  const Disk disk(kind, &plan, 16 * kBlockNbytes, 8, 8 * kMib);
  Unit source(kSplitAdam, 140), target(kSplitAdam, 141);
  source.move_to(disk);
  target.move_to(disk, 4 * kMib);
  Steps steps(disk, 12, 2, source.element_nbytes_in_file());
  UnitUpdate shadow = source.update(hyper_of(9), 1);
  shadow.shadow = target.shadow();
  std::vector<TicketPtr> tickets{steps.updater.submit(shadow),
                                 steps.updater.submit(source.update(hyper_of(1), 2))};
  shadow.runs = {{0, kCount, hyper_of(2)}};
  tickets.push_back(steps.updater.submit(shadow));
  for (const TicketPtr& ticket : tickets) wait(ticket);
  CHECK(target.contents(disk.engine.get())[0] == expected_of(kSplitAdam, 140)[0],
        "the second shadow is the second step");
}

TEST_OF_BACKENDS(update, a_shadow_that_cannot_hold_its_update_is_refused) {
  // A place missing, of another size, in a file instead of memory, the very array; the twin is a
  // whole one.
  const Disk disk(kind);
  Unit source(kSplitAdam, 142), target(kSplitAdam, 143),
      other(kSplitAdam, 144, kCount + kBlockNbytes);
  Unit in_file(kSplitAdam, 145);
  in_file.move_to(disk);
  Steps steps(disk, 2, 1, 14);
  UnitUpdate update = source.update(hyper_of(1));
  const auto submit = [&] { wait(steps.updater.submit(update)); };
  update.shadow = target.shadow();
  submit();
  update.shadow.master = nullptr;
  CHECK(said_by<UsageError>(submit).find("a place for every array") != std::string::npos);
  update.shadow = Shadow{source.shadow().weight};
  CHECK(said_by<UsageError>(submit).find("another kind or size") != std::string::npos);
  for (const Unit* wrong : {&other, &in_file, &source}) {
    update.shadow = target.shadow();
    update.shadow.exp_avg = wrong->shadow().exp_avg;
    CHECK(said_by<UsageError>(submit).find("another kind or size") != std::string::npos);
  }
}

TEST_OF_BACKENDS(update, a_gradient_that_lands_later_is_waited_for) {
  // The update comes first, then the gradient's bytes, then its ticket is finished.
  const Disk disk(kind);
  const auto expected = expected_of(kPlainSgd, 116);
  Unit unit(kPlainSgd, 116);
  unit.move_to(disk, 0, 0b00111);  // the gradient stays in memory
  const Span grad{unit.home(4).memory(), unit.home(4).nbytes()};
  const std::string landed(reinterpret_cast<char*>(grad.data), grad.nbytes);
  std::memset(grad.data, 0, grad.nbytes);
  const auto landing = std::make_shared<Ticket>(1);
  Steps steps(disk, 2, 1, unit.element_nbytes_in_file());
  const TicketPtr first = steps.updater.submit(unit.update(hyper_of(1), 1, landing));
  CHECK(!first->wait_for(0.02));
  std::memcpy(grad.data, landed.data(), landed.size());
  landing->part_done();
  wait(first);
  wait(steps.updater.submit(unit.update(hyper_of(2), 2)));
  CHECK(unit.contents(disk.engine.get()) == expected);
}

TEST_OF_BACKENDS(update, after_an_error_every_later_update_fails_with_it) {
  // A load or a save meets EIO at one of several pieces; a healthy unit in memory is not stepped
  // any more. The twin, without the fault, goes on.
  for (std::int64_t first_piece : {-1, 0, 3, 5, 7}) {
    FaultPlan plan = fault_plan(117);
    plan.eio = first_piece < 0 ? 0 : 1;
    Unit unit(kPlainSgd, 117), other(kPlainSgd, 118);
    const std::int64_t written_before = 3;  // weight, momentum and gradient, each one piece
    plan.first_piece = written_before + first_piece;
    const Disk disk(kind, &plan, 4 * kMib);
    unit.move_to(disk);
    Steps steps(disk, 1, 1, unit.element_nbytes_in_file());
    const TicketPtr ticket = steps.updater.submit(unit.update(hyper_of(1)));
    CHECK(ticket->wait_for(60));
    const auto before = other.contents(nullptr);
    const auto later = [&] { wait(steps.updater.submit(other.update(hyper_of(1)))); };
    if (first_piece < 0) {
      wait(ticket);
      later();
      CHECK(before != other.contents(nullptr));
      continue;
    }
    const std::string said = said_by<StorageError>([&] { ticket->wait(); });
    for (int i = 0; i < 2; ++i) CHECK(said_by<StorageError>(later) == said);
    CHECK(before == other.contents(nullptr), "a later update was made");
  }
}

TEST_OF_BACKENDS(update, updates_already_submitted_fail_with_the_first_error) {
  // Five updates of two units stand in line when the third chunk's load finds a flipped bit. All
  // wait for one gate: an update that waits for nothing would be made while the first one waits.
  const Disk disk(kind);
  Unit unit(kPlainSgd, 119), other(kPlainSgd, 120);
  unit.move_to(disk);
  disk.flip(unit.home(0).offset() + 2 * kGrain * 4 + 77);
  Steps steps(disk, 2, 2, unit.element_nbytes_in_file());
  const auto before = other.contents(nullptr);
  const auto gate = std::make_shared<Ticket>(1);
  std::vector<TicketPtr> tickets;
  for (int i = 1; i <= 5; ++i)
    tickets.push_back(steps.updater.submit((i % 2 ? unit : other).update(hyper_of(i), i, gate)));
  gate->part_done();
  std::vector<std::string> said;
  for (const TicketPtr& ticket : tickets)
    said.push_back(said_by<CorruptionError>([&] { wait(ticket); }));
  for (const std::string& each : said) CHECK(each == said[0], each);
  CHECK(said[0].find(disk.path) != std::string::npos, said[0]);
  CHECK(before == other.contents(nullptr));
}

TEST_OF_BACKENDS(update, an_updater_that_is_destroyed_finishes_what_it_was_given) {
  // Drops the updater behind two steps, its slots right after it, and reads the homes. Many times:
  // its last save is over a moment before the update is.
  const auto expected = expected_of(kSplitAdam, 121);
  for (int round = 0; round < 30; ++round) {
    FaultPlan plan = fault_plan(121 + round);
    plan.delay = 0.1;
    const Disk disk(kind, &plan);
    Unit unit(kSplitAdam, 121);
    unit.move_to(disk);
    std::vector<TicketPtr> tickets;
    {
      Steps steps(disk, 3, 2, unit.element_nbytes_in_file());
      for (int step = 1; step <= 2; ++step)
        tickets.push_back(steps.updater.submit(unit.update(hyper_of(step), step)));
    }
    for (const TicketPtr& ticket : tickets) CHECK(ticket->done());
    CHECK(unit.contents(disk.engine.get()) == expected);
  }
}

TEST(update, as_many_threads_step_as_are_worth_it) {
  // Steps chunks whose seconds are given by a rule, until the size is settled and once round again:
  // the fastest size, of two alike the smaller one, and no size tried below one that is slower.
  // Chunks too small to tell are not counted.
  struct Case {
    const char* machine;
    int most;
    double (*seconds)(int threads);
    int expected, least_tried;
  };
  const Case cases[] = {
      {"every thread counts", 8, [](int threads) { return 1.0 / threads; }, 8, 4},
      {"two threads of one core", 2, [](int threads) { return threads == 2 ? 1.1 : 1.0; }, 1, 1},
      {"a memory that four fill", 16, [](int threads) { return 1.0 / std::min(threads, 4); }, 4, 2},
      {"one processor", 1, [](int) { return 1.0; }, 1, 1},
      {"an odd number", 6, [](int threads) { return threads > 3 ? 0.5 : 1.0 / threads; }, 3, 1},
  };
  for (const Case& each : cases) {
    TeamSize size(each.most);
    int least_tried = each.most;
    for (int round = 0; round < 2; ++round)
      for (int chunk = 0; chunk < TeamSize::kChunksBetween + 30; ++chunk) {
        const int threads = size.next(TeamSize::kLeastElements);
        least_tried = std::min(least_tried, threads);
        size.note(TeamSize::kLeastElements, each.seconds(threads));
        size.note(TeamSize::kLeastElements - 1, 1e-9);
      }
    CHECK(size.next(TeamSize::kLeastElements) == each.expected, each.machine, ": ",
          size.next(TeamSize::kLeastElements));
    CHECK(size.next(1) == each.expected);
    CHECK(least_tried == each.least_tried, each.machine, ": ", least_tried);
  }
}

TEST(update, unusable_updates_are_refused_and_change_nothing) {
  // Counts, extents, runs and slots that do not fit together; then one that does.
  const Disk disk("threads");
  Unit unit(kSplitAdam, 122), in_file(kSplitAdam, 122);
  in_file.move_to(disk);
  const auto before = unit.contents(nullptr);
  Steps steps(disk, 2, 1, 14);
  const auto refused = [&](auto change) {
    UnitUpdate update = unit.update(hyper_of(1));
    change(update);
    said_by<UsageError>([&] { steps.updater.submit(update); });
  };
  refused([](UnitUpdate& u) { u.count = 0; });
  refused([](UnitUpdate& u) { u.count = 4095; });
  refused([](UnitUpdate& u) { u.count *= 2; });
  refused([](UnitUpdate& u) { u.weight = nullptr; });
  refused([](UnitUpdate& u) { u.grad = nullptr; });
  refused([](UnitUpdate& u) { u.master = nullptr; });
  refused([](UnitUpdate& u) { u.exp_avg_sq = nullptr; });
  refused([](UnitUpdate& u) {
    u.layout.rule = Rule::kAMSGrad, u.runs[0].hyper.amsgrad = true;  // needs a third moment
  });
  refused([](UnitUpdate& u) { u.layout.master = Master::kOwn; });
  refused([](UnitUpdate& u) { u.runs[0].end = kCount + 1; });
  refused([](UnitUpdate& u) { u.runs[0].end = 0; });
  refused([](UnitUpdate& u) { u.runs = {{10, 20, hyper_of(1)}, {19, 30, hyper_of(1)}}; });
  refused([](UnitUpdate& u) { u.runs[0].hyper.step = 0; });
  refused([](UnitUpdate& u) { u.layout.grad = DType::kFloat16; });
  Steps small(disk, 2, 1, 1), none(disk, 0, 1, 0);
  for (Updater* updater : {&small.updater, &none.updater}) {
    const std::string said =
        said_by<UsageError>([&] { updater->submit(in_file.update(hyper_of(1))); });
    CHECK(said.find("too small") != std::string::npos, said);
  }
  CHECK(before == unit.contents(nullptr) && before == in_file.contents(disk.engine.get()));
  wait(steps.updater.submit(unit.update(hyper_of(1))));
  CHECK(before != unit.contents(nullptr));
}

TEST_OF_BACKENDS(update, memory_that_runs_out_fails_an_update_whole) {
  // An update of arrays at home on the disk, in two chunks, with checksums there and in memory,
  // meets a shortage at each allocation. One that was refused at once is made again, with the right
  // bits. One that failed later has ended, and moves nothing any more: the disk's next writes are
  // the last ones.
  const std::size_t count = kGrain + 4096;
  const Disk disk(kind);
  const auto moved = [&] {
    return disk.engine->totals(Op::kRead).nbytes + disk.engine->totals(Op::kWrite).nbytes;
  };
  for (bool on_disk : {true, false}) {
    std::vector<std::string> expected;
    const auto check = [&](Shortage* shortage) {
      Unit unit(kOwnAdam, 131, count);
      unit.move_to(disk, 0, 0x7F, on_disk ? std::make_shared<SumCache>(2) : nullptr);
      Steps steps(disk, 2, 2, unit.element_nbytes_in_file());
      const UnitUpdate update = unit.update(hyper_of(1));
      TicketPtr ticket;
      const auto step = [&] {
        ticket = steps.updater.submit(update);
        wait(ticket);
      };
      const bool is_done = shortage && shortage->survived(step);
      const std::uint64_t by_then = moved();
      disk.engine->register_files_and_buffers({});  // waits for transfers
      CHECK(on_disk || moved() == by_then, "allocation ", shortage ? shortage->first() : 0);
      if (is_done || !ticket) {  // it was made, or is now
        if (!is_done) step();
        const auto state = unit.state(disk.engine.get());
        if (expected.empty()) expected = state;
        CHECK(state == expected, "allocation ", shortage ? shortage->first() : 0);
      } else {
        CHECK(ticket->done() && !ticket->succeeded());
        said_by<std::bad_alloc>([&] { steps.updater.submit(update); });
      }
    };
    check(nullptr);
    each_shortage([&](Shortage& shortage) { check(&shortage); }, on_disk ? 3 : 1);
  }
}

TEST(update, memory_that_runs_out_leaves_the_order_of_updates) {
  // A second update of the same arrays is refused at each allocation while the first one waits for
  // its gradient: the next one does not start before the first.
  const Disk disk("threads");
  const auto expected = expected_of(kPlainSgd, 132);
  each_shortage([&](Shortage& shortage) {
    const Unit unit(kPlainSgd, 132);
    Steps steps(disk, 0, 1, 0);
    const auto gradient = std::make_shared<Ticket>(1);
    const TicketPtr first = steps.updater.submit(unit.update(hyper_of(1), 1, gradient));
    const UnitUpdate update = unit.update(hyper_of(2), 2);
    TicketPtr second;
    shortage.survived([&] { second = steps.updater.submit(update); });
    if (!second) second = steps.updater.submit(update);
    CHECK(!second->wait_for(0.01), "it passed the first: allocation ", shortage.first());
    gradient->part_done();
    wait(first);
    wait(second);
    CHECK(unit.contents(nullptr) == expected, "allocation ", shortage.first());
  });
}

}  // namespace
}  // namespace infinity::tests
