// Volumes over several files, and a queue for each device: bytes come back from wherever they lie,
// and one disk's trouble is its own.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>

#include "tests/disk.h"

namespace infinity::tests {
namespace {

constexpr std::size_t kStripe = 2 * kChecksumNbytes;

// Several modelled disks in folders of their own, and one volume over them.
struct Disks {
  Disks(const std::string& kind, std::vector<std::uint64_t> counts, std::uint64_t nbytes,
        std::vector<double> rates = {}, const FaultPlan* faults = nullptr,
        std::uint64_t skipped = 0, unsigned depth = 4, double timeout_seconds = 120,
        bool instant = false) {
    const std::string root = concat(absolute("."), "/disks-", getpid(), "-", Disk::count()++);
    CHECK(mkdir(root.c_str(), 0700) == 0);
    IoOptions options;
    options.kind = kind;
    options.depth = depth;
    options.block_nbytes = 4 * kBlockNbytes;
    options.threads = 2;
    options.timeout_seconds = timeout_seconds;
    const auto layer = std::make_shared<doubles::Doubles>();
    if (faults) layer->faults = *faults;
    layer->instant = instant;
    layer->clocks = root + "/clocks";
    for (std::size_t i = 0; i < counts.size(); ++i) {
      folders.push_back(concat(root, "/disk", i));
      CHECK(mkdir(folders[i].c_str(), 0700) == 0);
      layer->models.push_back({folders[i], i < rates.size() ? rates[i] : 1e12});
    }
    options.layer = layer;
    engine = std::make_shared<IoEngine>(options);
    volume = std::make_shared<Volume>();
    sizes = volume->lay_out(kStripe, counts, skipped, nbytes);
    for (std::size_t i = 0; i < counts.size(); ++i)
      files.push_back(sizes[i] ? engine->create_swap_file(folders[i], sizes[i]) : -1);
    volume->set_files(files);
    for (const std::string& folder : folders) rmdir(folder.c_str());  // the files have no names
    unlink(layer->clocks.c_str());
    rmdir(root.c_str());
  }

  static std::string absolute(const char* path) {
    char found[4096];
    CHECK(realpath(path, found) != nullptr);
    return found;
  }

  // Which file holds each stripe.
  std::vector<int> owners(std::uint64_t nbytes) const {
    std::vector<int> found;
    for (std::uint64_t at = 0; at < nbytes; at += kStripe)
      found.push_back(volume->place(at, 1).file);
    return found;
  }

  std::vector<std::string> folders;
  std::vector<std::uint64_t> sizes;
  std::vector<int> files;
  std::shared_ptr<IoEngine> engine;
  std::shared_ptr<Volume> volume;
};

// --- where bytes lie ---

TEST(volume, every_byte_has_one_place_and_no_two_share_one) {
  // Members of several sizes, some turns skipped, the last stripe cut: every 4 KiB block has a
  // place inside its member, once; and each member is used to its last byte.
  const std::vector<std::vector<std::uint64_t>> layouts = {
      {5}, {3, 3}, {8, 1, 2}, {1, 0, 7, 7}, {2, 2, 2, 2, 2, 2, 2, 2}};
  for (const auto& counts : layouts)
    for (std::uint64_t skipped : {0, 1, 5}) {
      std::uint64_t stripes = 0;
      for (std::uint64_t count : counts) stripes += count;
      const std::uint64_t nbytes = stripes * kStripe - 3 * kBlockNbytes;
      Volume volume;
      const std::vector<std::uint64_t> sizes = volume.lay_out(kStripe, counts, skipped, nbytes);
      std::vector<int> files;
      for (std::size_t i = 0; i < counts.size(); ++i) files.push_back(static_cast<int>(i));
      volume.set_files(files);
      std::set<std::pair<int, std::uint64_t>> taken;
      for (std::uint64_t at = 0; at < nbytes; at += kBlockNbytes) {
        const Volume::Place place = volume.place(at, kBlockNbytes);
        CHECK(place.nbytes == kBlockNbytes && place.offset + kBlockNbytes <= sizes.at(place.file),
              "byte ", at);
        CHECK(taken.insert({place.file, place.offset}).second, "byte ", at,
              " lies where another does");
      }
      std::uint64_t held = 0;
      for (std::uint64_t size : sizes) held += size;
      CHECK(held == nbytes && taken.size() * kBlockNbytes == nbytes, held);
    }
}

// Who has each stripe, dealt turn by turn: the definition.
std::vector<std::pair<int, std::uint64_t>> dealt(const std::vector<std::uint64_t>& counts,
                                                 std::uint64_t skipped, std::uint64_t stripes) {
  std::vector<std::pair<int, std::uint64_t>> found;
  std::vector<std::uint64_t> turns(counts.size()), used(counts.size());
  while (found.size() < stripes) {
    std::size_t next = counts.size();
    for (std::size_t each = 0; each < counts.size(); ++each) {
      if (used[each] == counts[each]) continue;
      if (next == counts.size() ||
          (2 * turns[each] + 1) * counts[next] < (2 * turns[next] + 1) * counts[each])
        next = each;
    }
    ++turns[next];
    if (skipped > 0)
      --skipped;
    else
      found.emplace_back(static_cast<int>(next), used[next]++);
  }
  return found;
}

TEST(volume, places_are_computed_as_stripes_are_dealt) {
  // Random members, some without stripes, some much larger, turns skipped, room to spare: the place
  // of every stripe is that which dealing them one by one gives it. The twin: one turn more is
  // skipped, and some are elsewhere.
  Random random(93);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint64_t> counts;
    std::uint64_t held = 0;
    for (std::size_t i = 0, members = 2 + random.below(8); i < members; ++i) {
      counts.push_back(random.below(4) == 0 ? 0 : 1 + random.below(round % 3 == 0 ? 4 : 90));
      held += counts.back();
    }
    if (held == 0) continue;
    const std::uint64_t wanted = held - random.below(1 + held / 3), skipped = random.below(9);
    Volume volume;
    volume.lay_out(kStripe, counts, skipped, wanted * kStripe);
    std::vector<int> files;
    for (std::size_t i = 0; i < counts.size(); ++i) files.push_back(static_cast<int>(i));
    volume.set_files(files);
    std::vector<std::pair<int, std::uint64_t>> found;
    for (std::uint64_t stripe = 0; stripe < wanted; ++stripe) {
      const Volume::Place place = volume.place(stripe * kStripe, 1);
      found.emplace_back(place.file, place.offset / kStripe);
    }
    CHECK(found == dealt(counts, skipped, wanted), "round ", round);
    if (round == 1) CHECK(found != dealt(counts, skipped + 1, wanted));
  }
}

TEST(volume, a_place_of_a_petabyte_takes_no_memory_and_no_walk) {
  // Eight members of 2^30 stripes, nearly: the last stripes of all lie on all of them, each at its
  // end.
  const std::vector<std::uint64_t> counts = {1 << 30, (1 << 30) - 1, 1 << 29, 1 << 28,
                                             1 << 30, 1 << 20,       1 << 30, 3};
  std::uint64_t stripes = 0;
  for (std::uint64_t count : counts) stripes += count;
  Volume volume;
  const std::vector<std::uint64_t> sizes = volume.lay_out(kStripe, counts, 3, stripes * kStripe);
  for (std::size_t i = 0; i < counts.size(); ++i) CHECK(sizes[i] == counts[i] * kStripe, i);
  volume.set_files({0, 1, 2, 3, 4, 5, 6, 7});
  std::set<int> last;
  for (std::uint64_t i = 1; i <= 10'000; ++i) {
    const Volume::Place place = volume.place((stripes - i) * kStripe, 1);
    CHECK(place.offset / kStripe < counts[place.file]);
    last.insert(place.file);
  }
  CHECK(last.size() >= 6, last.size());
}

TEST(volume, any_stripes_in_a_row_lie_on_all_members_in_proportion) {
  // Of every run of stripes each member has its part, give or take two; equal members take strict
  // turns.
  const std::vector<std::vector<std::uint64_t>> layouts = {
      {64, 64, 64, 64}, {100, 100, 10}, {30, 60, 90}};
  for (const auto& counts : layouts) {
    std::uint64_t stripes = 0;
    for (std::uint64_t count : counts) stripes += count;
    Volume volume;
    volume.lay_out(kStripe, counts, 0, stripes * kStripe);
    std::vector<int> files;
    for (std::size_t i = 0; i < counts.size(); ++i) files.push_back(static_cast<int>(i));
    volume.set_files(files);
    for (std::uint64_t first = 0; first + 24 <= stripes; ++first) {
      std::vector<double> found(counts.size());
      for (std::uint64_t i = first; i < first + 24; ++i) ++found[volume.place(i * kStripe, 1).file];
      for (std::size_t i = 0; i < counts.size(); ++i) {
        const double expected =
            24.0 * static_cast<double>(counts[i]) / static_cast<double>(stripes);
        CHECK(std::abs(found[i] - expected) <= 2, "member ", i, " has ", found[i], " of ",
              expected);
      }
    }
  }
}

TEST(volume, ranks_start_at_different_members) {
  // Eight ranks with as many turns skipped: the first stripe of each lies on another member.
  std::set<int> first;
  for (std::uint64_t rank = 0; rank < 8; ++rank) {
    Volume volume;
    volume.lay_out(kStripe, std::vector<std::uint64_t>(8, 4), rank, 32 * kStripe);
    volume.set_files({0, 1, 2, 3, 4, 5, 6, 7});
    first.insert(volume.place(0, 1).file);
  }
  CHECK(first.size() == 8, first.size());
}

TEST(volume, unusable_layouts_are_refused_with_their_numbers) {
  // Each alone; and a transfer before there are files, a second layout, a byte beyond the end.
  const auto refused = [](std::size_t stripe, const std::vector<std::uint64_t>& counts,
                          std::uint64_t nbytes, const std::string& tells) {
    Volume volume;
    const std::string said =
        said_by<UsageError>([&] { volume.lay_out(stripe, counts, 0, nbytes); });
    CHECK(has(said, tells), said);
  };
  refused(0, {1}, kStripe, "0 bytes");
  refused(kBlockNbytes, {1}, kStripe, "4096");
  refused(kStripe, {}, kStripe, "without members");
  refused(kStripe, {1, 1}, 0, "0 bytes");
  refused(kStripe, {1, 1}, 100, "100 bytes");
  refused(kStripe, {1, 1}, 2 * kStripe + kBlockNbytes, "in 2 stripes");
  refused(kStripe, {std::uint64_t{1} << 31}, kStripe, "stripes");
  Volume volume;
  volume.lay_out(kStripe, {1, 1}, 0, 2 * kStripe);
  said_by<UsageError>([&] { volume.lay_out(kStripe, {1, 1}, 0, 2 * kStripe); });
  CHECK(has(said_by<UsageError>([&] { volume.place(0, 1); }), "no files"));
  said_by<UsageError>([&] { volume.set_files({0}); });
  volume.set_files({0, 1});
  said_by<UsageError>([&] { volume.place(2 * kStripe, 1); });
}

TEST_OF_BACKENDS(volume, parts_of_every_size_come_back) {
  // Extents side by side on three disks of unlike parts; parts below, at and over a stripe, read
  // back whole and in parts, with short, late and reordered transfers.
  Random random(101);
  FaultPlan plan = fault_plan(101);
  plan.short_transfer = plan.reorder = 0.3, plan.delay = 0.1;
  const std::size_t nbytes = 5 * kStripe + 3 * kBlockNbytes;
  const Disks disks(kind, {4, 9, 20}, 3 * nbytes, {}, &plan);
  std::vector<Extent> extents;
  std::vector<std::unique_ptr<Memory>> sources;
  for (std::size_t i = 0; i < 3; ++i) {
    extents.push_back(Extent::in_volume(disks.volume, i * nbytes, nbytes));
    sources.push_back(std::make_unique<Memory>(nbytes, random));
    wait(extents[i].write(*disks.engine, 0, sources[i]->span));
  }
  const Memory target(nbytes);
  for (std::size_t i = 0; i < 3; ++i)
    for (std::size_t at : {std::size_t{0}, kChecksumNbytes, kStripe, 3 * kStripe + kChecksumNbytes})
      for (std::size_t count : {kChecksumNbytes, kStripe, nbytes - at}) {
        const Span part = target.part(at, std::min(count, nbytes - at));
        wait(extents[i].read(*disks.engine, at, part));
        CHECK(same(part, sources[i]->part(at, part.nbytes)), "extent ", i, " at ", at);
      }
}

TEST_OF_BACKENDS(volume, a_fault_in_one_folder_names_it_and_leaves_the_others) {
  // Every transfer of the second of three disks meets EIO or ENOSPC, or loses its write, or has a
  // bit flipped: the error names that folder, and the bytes of the others are as they were written.
  for (int fault = 0; fault < 4; ++fault) {
    Random random(102);
    FaultPlan plan = fault_plan(102);
    plan.file = 1;
    plan.eio = fault == 0, plan.enospc = fault == 1, plan.lost_write = fault == 2,
    plan.bit_flip = fault == 3;
    const Disks disks(kind, {2, 2, 2}, 6 * kStripe, {}, &plan);
    const Memory source(6 * kStripe, random), target(6 * kStripe);
    Extent extent = Extent::in_volume(disks.volume, 0, 6 * kStripe);
    const TicketPtr written = extent.write(*disks.engine, 0, source.span);
    const std::string& folder = disks.folders[1];
    if (fault < 2) {
      const StorageError error = thrown_by<StorageError>(written);
      CHECK(error.error_number == (fault ? ENOSPC : EIO) && error.path == folder &&
                has(error.what(), folder),
            error.what());
    } else {
      wait(written);
      const std::string said =
          thrown_by<CorruptionError>(extent.read(*disks.engine, 0, target.span)).what();
      CHECK(has(said, folder + " at offset"), said);
    }
    const std::vector<int> owners = disks.owners(6 * kStripe);
    for (std::size_t i = 0; i < owners.size(); ++i) {
      if (owners[i] == disks.files[1]) continue;
      const Span part = target.part(i * kStripe, kStripe);
      const Volume::Place place = disks.volume->place(i * kStripe, kStripe);
      wait(disks.engine->submit({{Op::kRead, place.file, place.offset, part}}));
      CHECK(same(part, source.part(i * kStripe, kStripe)), "stripe ", i,
            " of a disk without a fault");
    }
  }
}

// --- a queue for each device ---

TEST_OF_BACKENDS(volume, a_disk_has_its_modelled_rate) {
  // The model's own check: 2 MiB at 8 MB/s take a quarter of a second at least, though the disk
  // below is faster; and files of two disks move beside each other: both take less than the two in
  // turn.
  const Disks disks(kind, {16, 16}, 32 * kStripe, {8e6, 8e6});
  const Memory memory(32 * kStripe);
  const auto seconds = [&](const std::vector<Request>& requests) {
    const auto start = std::chrono::steady_clock::now();
    wait(disks.engine->submit(requests));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const Request first{Op::kWrite, disks.files[0], 0, memory.part(0, 2 * kMib)};
  const Request second{Op::kWrite, disks.files[1], 0, memory.part(2 * kMib, 2 * kMib)};
  const double one = seconds({first}), both = seconds({first, second});
  CHECK(one >= 0.99 * 2 * kMib / 8e6, one);
  CHECK(both < 2 * 2 * kMib / 8e6 || both < 1.5 * one, both);
}

TEST(volume, disks_that_move_nothing_have_their_modelled_rate_and_leave_memory_as_it_was) {
  // Of the instant backend: 64 stripes at a rate that this machine's disks do not have, and a read
  // that would have brought zeros.
  const Disks disks("threads", {32, 32}, 64 * kStripe, {32 * kStripe / 0.05, 32 * kStripe / 0.05},
                    nullptr, 0, 4, 120, true);
  const Memory memory(64 * kStripe);
  std::fill_n(memory.span.data, memory.span.nbytes, std::byte{7});
  const auto start = std::chrono::steady_clock::now();
  wait(disks.engine->submit(
      {{Op::kRead, disks.files[0], 0, memory.part(0, 32 * kStripe)},
       {Op::kRead, disks.files[1], 0, memory.part(32 * kStripe, 32 * kStripe)}}));
  const double taken =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(taken >= 0.99 * 0.05, taken);
  CHECK(memory.bytes() == std::string(memory.span.nbytes, '\7'), "something was moved");
}

TEST_OF_BACKENDS(volume, a_slow_disk_delays_only_its_own) {
  // Sixty reads of a disk that needs a minute for them, then some of another: those are over while
  // the slow ones wait.
  const Disks disks(kind, {8, 8}, 16 * kStripe, {1e12, 1e12, 1e12});
  const Disks slow(kind, {8, 8}, 16 * kStripe, {2e5, 1e12});
  const Memory memory(16 * kStripe), target(4 * kStripe);
  std::vector<TicketPtr> late;
  for (int i = 0; i < 60; ++i)
    late.push_back(slow.engine->submit({{Op::kRead, slow.files[0], 0, memory.part(0, kStripe)}}));
  for (int i = 0; i < 20; ++i)
    wait(slow.engine->submit({{Op::kRead, slow.files[1], 0, target.part(0, 4 * kStripe)}}));
  CHECK(!late.front()->done(), "the slow disk is not slow");
  for (const TicketPtr& ticket : late) slow.engine->cancel(ticket);
  for (const TicketPtr& ticket : late) ticket->wait_for(60);
}

TEST(volume, one_hung_disk_of_eight_is_named_in_time_and_the_others_go_on) {
  // The fourth of eight disks stops answering. What needs it fails in time and names it; meanwhile
  // and afterwards the others' stripes are read and written.
  FaultPlan plan = fault_plan(103);
  plan.file = 3, plan.hang = 1;
  for (const std::string& kind : {std::string("uring"), std::string("threads")}) {
    std::string why;
    if (kind == "uring" && !make_uring_backend(4, why)) continue;
    // Never destroyed: what hangs would be left behind. Kept where a sanitizer finds it.
    static auto& kept = *new std::vector<const Disks*>;
    kept.push_back(
        new Disks(kind, std::vector<std::uint64_t>(8, 2), 16 * kStripe, {}, &plan, 0, 2, 0.3));
    const Disks& disks = *kept.back();
    static const Memory source(16 * kStripe), target(16 * kStripe);
    Extent extent = Extent::in_volume(disks.volume, 0, 16 * kStripe);
    const TicketPtr written = extent.write(*disks.engine, 0, source.span);
    const auto read = [&](int disk) {
      return disks.engine->submit(
          {{Op::kRead, disks.files[disk], 0, target.part(disk * kStripe, kStripe)}});
    };
    for (int disk : {0, 1, 2, 4, 5, 6, 7}) wait(read(disk));
    CHECK(!written->done(), "the others waited for the hung disk");
    const StorageError error = thrown_by<StorageError>(written);
    CHECK(error.error_number == ETIMEDOUT && error.path == disks.folders[3] &&
              has(error.what(), "model " + disks.folders[3]),
          error.what());
    for (int disk : {0, 1, 2, 4, 5, 6, 7}) wait(read(disk));
    CHECK(thrown_by<StorageError>(read(3)).error_number == ETIMEDOUT);
  }
}

TEST_OF_BACKENDS(volume, what_is_waited_for_passes_what_is_not) {
  // Thirty writes and ten reads ahead of a slow disk with one slot, all but the first waiting; then
  // the last read is waited for, and one behind a joined ticket: when they are over most of the
  // others are not. The twin: the next one in the queue is over before the last.
  const Disks disks(kind, {40}, 40 * kStripe, {2e6}, nullptr, 0, 1);
  const Memory memory(40 * kBlockNbytes);
  std::vector<TicketPtr> tickets;
  for (std::size_t i = 0; i < 40; ++i)
    tickets.push_back(disks.engine->submit(
        {{i < 30 ? Op::kWrite : Op::kRead, disks.files[0], i * 4 * kBlockNbytes,
          memory.part(i * kBlockNbytes, kBlockNbytes)}}));
  const TicketPtr both = joined({tickets[37], tickets[38]});
  wait(tickets[39]);
  wait(both);
  CHECK(tickets[37]->done() && tickets[38]->done());
  const auto done = std::count_if(tickets.begin(), tickets.end(),
                                  [](const TicketPtr& ticket) { return ticket->done(); });
  CHECK(done < 30, done, " of 40 were over before what was waited for");
  wait(tickets[36]);
  CHECK(!tickets[35]->done(), "the queue has another order");
  for (const TicketPtr& ticket : tickets) wait(ticket);
}

TEST_OF_BACKENDS(volume, what_it_comes_after_is_hurried_too) {
  // A read behind a write far back in the queue of a slow disk is waited for: the write goes first
  // as well.
  const Disks disks(kind, {40}, 40 * kStripe, {2e6}, nullptr, 0, 1);
  const auto memory = std::make_shared<Memory>(40 * kChecksumNbytes);
  Extent extent = Extent::in_volume(disks.volume, 0, 40 * kChecksumNbytes);
  std::vector<TicketPtr> tickets;
  for (std::size_t i = 0; i < 12; ++i)
    tickets.push_back(extent.write(*disks.engine, i * kChecksumNbytes,
                                   memory->part(i * kChecksumNbytes, kChecksumNbytes), memory));
  wait(extent.read(*disks.engine, 11 * kChecksumNbytes,
                   memory->part(20 * kChecksumNbytes, kChecksumNbytes), nullptr, memory));
  CHECK(tickets[11]->done() && !tickets[9]->done());
  for (const TicketPtr& ticket : tickets) wait(ticket);
}

}  // namespace
}  // namespace infinity::tests
