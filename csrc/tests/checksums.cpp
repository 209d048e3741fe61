// Work on pieces beside their transfers, and the checksums of extents, which are such work: what is
// wrong is found wherever it is, before anything is handed out; and no thread that asks or waits
// does any of it.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "tests/disk.h"
#include "tests/scarce.h"

namespace infinity::tests {
namespace {

constexpr std::size_t kPieces[] = {kBlockNbytes, 3 * kBlockNbytes, kChecksumNbytes,
                                   kChecksumNbytes + kBlockNbytes, kMib};

TEST_OF_BACKENDS(checksums, a_bit_flipped_in_any_piece_is_found_with_its_offset) {
  // Pieces that cut blocks, that are blocks, and that are several: a bit anywhere fails the read
  // with the offset of its block. The same read without checksums does not see it (the twin), and
  // one of the other blocks has nothing to see.
  Random random(81);
  const std::size_t nbytes = 5 * kChecksumNbytes + 3 * kBlockNbytes, offset = 3 * kBlockNbytes;
  for (std::size_t piece : kPieces) {
    const Disk disk(kind, nullptr, piece);
    const Memory source(nbytes, random), target(nbytes);
    Extent extent = Extent::in_file(disk.file, offset, nbytes);
    wait(extent.write(*disk.engine, 0, source.span));
    wait(extent.read(*disk.engine, 0, target.span));
    CHECK(same(source.span, target.span));
    for (int round = 0; round < 12; ++round) {
      const std::size_t at = round == 0 ? 0 : round == 1 ? nbytes - 1 : random.below(nbytes);
      const std::size_t block = at / kChecksumNbytes;
      disk.flip(offset + at);
      const std::string said =
          thrown_by<CorruptionError>(extent.read(*disk.engine, 0, target.span)).what();
      CHECK(has(said, concat(disk.path, " at offset ", offset + block * kChecksumNbytes, " (")),
            said, " for byte ", at);
      wait(extent.read(*disk.engine, 0, target.span, nullptr, nullptr, false));
      CHECK(!same(source.span, target.span));
      const std::size_t other = (block + 1) % 6 * kChecksumNbytes;
      wait(extent.read(*disk.engine, other,
                       target.part(0, std::min(kChecksumNbytes, nbytes - other))));
      disk.flip(offset + at);
    }
  }
}

TEST_OF_BACKENDS(checksums, what_was_lost_on_the_way_to_the_disk_is_found) {
  // Writes that are reported and never performed, short transfers that go on in mid-block, and late
  // ones: the first is found, the others change nothing.
  Random random(82);
  for (bool lost : {false, true}) {
    FaultPlan plan = fault_plan(82);
    plan.short_transfer = plan.delay = plan.reorder = 0.4;
    plan.lost_write = lost;
    const Disk disk(kind, &plan, 3 * kBlockNbytes);
    const Memory source(4 * kChecksumNbytes, random), target(4 * kChecksumNbytes);
    Extent extent = Extent::in_file(disk.file, kBlockNbytes, 4 * kChecksumNbytes);
    wait(extent.write(*disk.engine, 0, source.span));
    const TicketPtr read = extent.read(*disk.engine, 0, target.span);
    if (lost) {
      thrown_by<CorruptionError>(read);
    } else {
      wait(read);
      CHECK(same(source.span, target.span));
    }
  }
}

TEST_OF_BACKENDS(checksums, pieces_that_come_after_a_failed_one_are_waited_for) {
  // Bits flip in all pieces, which come late and in another order: the ticket fails once, when
  // nobody writes to or looks at the memory.
  FaultPlan plan = fault_plan(83);
  plan.bit_flip = 1, plan.delay = plan.reorder = 0.7, plan.delay_seconds = 0.002;
  const Disk disk(kind, &plan, kBlockNbytes, 16);
  Extent extent = Extent::in_file(disk.file, 0, 4 * kChecksumNbytes);
  for (int round = 0; round < 5; ++round) {
    auto target = std::make_unique<Memory>(extent.nbytes());
    std::atomic<int> ends{0};
    const TicketPtr read = extent.read(*disk.engine, 0, target->span);
    read->on_done([&](std::exception_ptr error) { ends += error ? 1 : 100; });
    thrown_by<CorruptionError>(read);
    target.reset();  // unmapped: who still looked at it would crash
    for (int i = 0; i < 1000 && ends == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(ends == 1);
  }
}

// Extents with tables, in one file that is one volume, and the cache that they share.
struct Tabled {
  Tabled(const std::string& kind, std::size_t pages, std::size_t nbytes, std::size_t count = 1)
      : disk(kind, nullptr, 5 * kBlockNbytes, 8, count * (nbytes + SumTable::nbytes_of(nbytes))),
        cache(std::make_shared<SumCache>(pages)) {
    const auto volume = Volume::of(disk.file);
    for (std::size_t i = 0; i < count; ++i)
      extents.push_back(
          Extent::in_volume(volume, i * (nbytes + SumTable::nbytes_of(nbytes)), nbytes, cache));
  }
  std::uint64_t table_of(std::size_t index) const {
    return extents[index].offset() + extents[index].nbytes();
  }
  const Disk disk;
  const std::shared_ptr<SumCache> cache;
  std::vector<Extent> extents;
};

TEST_OF_BACKENDS(checksums, on_disk_they_find_what_they_find_in_memory) {
  // Four extents share one page of memory: each transfer moves the sums of the last one's extent
  // out and its own in. Zeros count before the first write. A flipped bit of the data is found with
  // its block, one of the sums with their page; both count again once it is flipped back (the
  // twin).
  Random random(87);
  const std::size_t nbytes = 2 * kChecksumNbytes + kBlockNbytes;
  for (std::size_t pages : {1, 3}) {
    Tabled tabled(kind, pages, nbytes, 4);
    const Disk& disk = tabled.disk;
    const Memory target(nbytes);
    std::vector<std::unique_ptr<Memory>> sources;
    for (Extent& extent : tabled.extents) wait(extent.read(*disk.engine, 0, target.span));
    CHECK(disk.engine->totals(Op::kRead).nbytes == 4 * nbytes);  // no page is there to be read
    for (Extent& extent : tabled.extents) {
      sources.push_back(std::make_unique<Memory>(nbytes, random));
      wait(extent.write(*disk.engine, 0, sources.back()->span));
    }
    for (std::size_t i = 0; i < 4; ++i) {
      wait(tabled.extents[i].read(*disk.engine, 0, target.span));
      CHECK(same(sources[i]->span, target.span));
    }
    // A block alone, by the updater's way: the other sums of its page stay.
    random.fill(sources[0]->part(kChecksumNbytes, kChecksumNbytes));
    const Span part = sources[0]->part(kChecksumNbytes, kChecksumNbytes);
    tabled.extents[0].remember(kChecksumNbytes, part, *disk.engine);
    wait(disk.engine->submit(tabled.extents[0].requests(Op::kWrite, kChecksumNbytes, part)));
    for (std::size_t i : {1, 2, 3, 0}) wait(tabled.extents[i].read(*disk.engine, 0, target.span));
    CHECK(same(sources[0]->span, target.span));
    tabled.extents[0].verify(0, target.span, *disk.engine);
    const auto read_others = [&] {  // twice: then the first one's page has given way
      for (std::size_t i : {1, 2, 3, 1, 2, 3})
        wait(tabled.extents[i].read(*disk.engine, 0, target.span));
    };
    read_others();
    for (const auto& [at, told] :
         {std::pair{tabled.extents[0].offset() + kChecksumNbytes + 77, kChecksumNbytes},
          std::pair{std::size_t{tabled.table_of(0)} + 5, std::size_t{tabled.table_of(0)}}}) {
      disk.flip(at);
      for (int again = 0; again < 2; ++again) {
        const std::string said =
            thrown_by<CorruptionError>(tabled.extents[0].read(*disk.engine, 0, target.span)).what();
        CHECK(has(said, concat(disk.path, " at offset ", told, " ")), said);
        read_others();
      }
      disk.flip(at);
      wait(tabled.extents[0].read(*disk.engine, 0, target.span));
      read_others();
    }
  }
}

TEST_OF_BACKENDS(checksums, data_that_come_back_old_with_their_checksums_are_found) {
  // The disk brings a block and the page of its sum as they were before the last write: they fit
  // each other, but the digest in memory is of another page. The twin: the new ones are read.
  Random random(88);
  Tabled tabled(kind, 1, kChecksumNbytes, 2);
  const Disk& disk = tabled.disk;
  const Memory source(kChecksumNbytes, random), target(kChecksumNbytes);
  Extent &extent = tabled.extents[0], &other = tabled.extents[1];
  std::vector<std::string> states;
  for (int round = 0; round < 2; ++round) {
    random.fill(source.span);
    wait(extent.write(*disk.engine, 0, source.span));
    wait(other.read(*disk.engine, 0, target.span));  // the page goes to disk
    states.push_back(disk.raw(0, kChecksumNbytes + kBlockNbytes));
  }
  const auto bring = [&](const std::string& state) {
    std::fstream(disk.path, std::ios::in | std::ios::out | std::ios::binary)
        .write(state.data(), static_cast<std::streamsize>(state.size()));
  };
  bring(states[0]);
  const std::string said =
      thrown_by<CorruptionError>(extent.read(*disk.engine, 0, target.span)).what();
  CHECK(has(said, concat("the checksums in ", disk.path, " at offset ", tabled.table_of(0))), said);
  bring(states[1]);
  wait(extent.read(*disk.engine, 0, target.span));
  CHECK(same(source.span, target.span));
}

TEST(checksums, on_disk_take_little_memory_and_few_transfers) {
  // 64 MiB of data have one page: an extent with a block more has two, which one slot holds in
  // turns. Counts the bytes moved, and those of a table of 1 TiB in memory and on disk.
  CHECK(SumTable::nbytes_of(kChecksumNbytes * SumTable::kPageSums) == kBlockNbytes);
  CHECK(SumTable::nbytes_of(std::size_t{1} << 40) == 16384 * kBlockNbytes);
  const std::size_t nbytes = kChecksumNbytes * (SumTable::kPageSums + 1);
  Random random(89);
  Tabled tabled("threads", 1, nbytes);
  const Disk& disk = tabled.disk;
  const Memory source(4 * kChecksumNbytes, random), target(4 * kChecksumNbytes);
  const std::size_t first = nbytes - source.span.nbytes;
  Extent& extent = tabled.extents[0];
  wait(extent.write(*disk.engine, first, source.span));
  wait(extent.read(*disk.engine, 0, target.span));
  wait(extent.read(*disk.engine, first, target.span));
  CHECK(same(source.span, target.span));
  // The work threads take the blocks in any order, so a page may pass more than once.
  const auto pages = [&](Op op, std::size_t nbytes_of_data) {
    return (disk.engine->totals(op).nbytes - nbytes_of_data) / kBlockNbytes;
  };
  CHECK(pages(Op::kWrite, source.span.nbytes) >= 1 &&
        pages(Op::kRead, 2 * 4 * kChecksumNbytes) >= 1);
  const std::uint64_t before = disk.engine->totals(Op::kRead).nbytes;
  for (int i = 0; i < 10; ++i) wait(extent.read(*disk.engine, 0, target.span));
  CHECK(disk.engine->totals(Op::kRead).nbytes - before <= 10 * target.span.nbytes + kBlockNbytes);
}

TEST(checksums, a_table_on_a_disk_that_hangs_is_an_error_in_time) {
  // The block is on one file and its table on another, whose device never answers a read. The read
  // of the block fails with the timeout and that file's path; a write, whose page stays in memory,
  // does not.
  for (const std::string& kind : {std::string("uring"), std::string("threads")}) {
    std::string why;
    if (kind == "uring" && !make_uring_backend(4, why)) continue;
    IoOptions options;
    options.kind = kind;
    options.timeout_seconds = 0.3;
    options.work_threads = 2;
    FaultPlan faults;
    faults.hang = 1, faults.first_piece = 1, faults.file = 1;  // its first piece is a write
    options.layer = layer_of(faults);
    IoEngine& engine = *new IoEngine(options);  // what hangs would be left behind
    const auto volume = std::make_shared<Volume>();
    const std::size_t room = 4 * kChecksumNbytes;
    const std::vector<std::uint64_t> sizes = volume->lay_out(kChecksumNbytes, {2, 2}, 0, room);
    std::vector<int> files;
    for (const char* name : {"sound-", "hung-"})
      files.push_back(engine.create_file(name + kind, sizes[files.size()]));
    volume->set_files(files);
    const auto cache = std::make_shared<SumCache>(1);
    static const Memory memory(kChecksumNbytes);
    Extent first = Extent::in_volume(volume, 0, kChecksumNbytes, cache),
           second = Extent::in_volume(volume, 2 * kChecksumNbytes, kChecksumNbytes, cache);
    wait(first.write(engine, 0, memory.span));
    wait(second.read(engine, 0, memory.span));  // the first one's page is written
    const StorageError error = thrown_by<StorageError>(first.read(engine, 0, memory.span));
    CHECK(error.error_number == ETIMEDOUT && has(error.what(), "hung-" + kind), error.what());
    for (const char* name : {"sound-", "hung-"}) unlink((name + kind).c_str());
  }
}

TEST(checksums, a_table_on_a_disk_that_hangs_holds_up_no_other) {
  // A page is being written to a file whose device never answers, for the slot of two others that
  // reads wait for. Meanwhile extents with tables on another disk, of the same cache, whose pages
  // come and go, are written, read and verified by the one work thread: the bytes are right, and
  // flipped ones are found. The twin: the reads that need the hung disk are not over.
  for (const std::string& kind : {std::string("uring"), std::string("threads")}) {
    std::string why;
    if (kind == "uring" && !make_uring_backend(4, why)) continue;
    IoOptions options;
    options.kind = kind;
    options.timeout_seconds = 3600;
    options.work_threads = 1;
    FaultPlan faults;
    faults.hang = 1, faults.first_piece = 1, faults.file = 1;  // its first piece is a write
    options.layer = layer_of(faults);
    IoEngine& engine = *new IoEngine(options);  // what hangs would be left behind
    const std::size_t nbytes = kChecksumNbytes, room = 6 * nbytes;
    const auto volume = std::make_shared<Volume>();
    const std::vector<std::uint64_t> sizes = volume->lay_out(nbytes, {3, 3}, 0, room);
    std::vector<int> files;
    for (const char* name : {"data-", "hung-"})
      files.push_back(engine.create_file(name + kind, sizes[files.size()]));
    volume->set_files(files);
    const std::size_t each = nbytes + SumTable::nbytes_of(nbytes);
    const std::string path = "sound-" + kind;
    const auto sound = Volume::of(engine.create_file(path, 4 * each));
    const auto cache = std::make_shared<SumCache>(1);
    Random random(90);
    static const Memory memory(nbytes), more(nbytes);
    std::vector<Extent> stuck;
    for (std::size_t stripe : {0, 2, 4})
      stuck.push_back(Extent::in_volume(volume, stripe * nbytes, nbytes, cache));
    wait(stuck[0].write(engine, 0, memory.span));
    wait(stuck[1].write(engine, 0, memory.span));  // the page of the first is written
    const TicketPtr first = stuck[0].read(engine, 0, memory.span),
                    third = stuck[2].read(engine, 0, more.span);
    std::vector<Extent> others;
    std::vector<std::unique_ptr<Memory>> sources;
    for (std::size_t i = 0; i < 4; ++i) {
      others.push_back(Extent::in_volume(sound, i * each, nbytes, cache));
      sources.push_back(std::make_unique<Memory>(nbytes, random));
      wait(others[i].write(engine, 0, sources[i]->span));
    }
    const Memory target(nbytes);
    for (std::size_t i = 0; i < 4; ++i) {
      wait(others[i].read(engine, 0, target.span));
      CHECK(same(sources[i]->span, target.span));
    }
    std::fstream(path.c_str(), std::ios::in | std::ios::out | std::ios::binary).put('x');
    thrown_by<CorruptionError>(others[0].read(engine, 0, target.span));
    CHECK(!first->done() && !third->done());
    for (const std::string& name : {"data-" + kind, "hung-" + kind, path}) unlink(name.c_str());
  }
}

TEST_OF_BACKENDS(checksums, a_page_that_cannot_be_written_fails_who_needs_it) {
  // One slot; the disk refuses every write of a page that gives way. Reads of the extent that wants
  // the slot are right, and the extent of the lost page fails with the disk's error, which names
  // the write. The twin: without faults both are read.
  for (bool fails : {false, true}) {
    FaultPlan plan = fault_plan(91);
    plan.eio = fails, plan.first_piece = 1;
    const std::size_t nbytes = kChecksumNbytes, each = nbytes + SumTable::nbytes_of(nbytes);
    const Disk tables(kind, &plan, kMib, 8, 2 * each);
    const auto volume = Volume::of(tables.file);
    const auto cache = std::make_shared<SumCache>(1);
    const Memory memory(nbytes);
    Extent written = Extent::in_volume(volume, 0, nbytes, cache);
    const Sums sums = std::make_shared<std::vector<std::uint32_t>>(1),
               others = std::make_shared<std::vector<std::uint32_t>>(1);
    wait(written.write(*tables.engine, 0, memory.span));
    const auto other = std::make_shared<SumTable>(cache, volume, each + nbytes, nbytes);
    wait(other->move(Op::kRead, 0, others, *tables.engine));
    CHECK(others->front() == sum_of_zeros(nbytes));
    const Extent::Expected known = written.expected(0, nbytes, *tables.engine);
    if (!fails) {
      wait(known.ticket);
      CHECK(known.sums->front() == sum_of_zeros(nbytes));
      continue;
    }
    const StorageError error = thrown_by<StorageError>(known.ticket);
    CHECK(error.error_number == EIO && has(error.what(), "write of 4096"), error.what());
    wait(other->move(Op::kRead, 0, others, *tables.engine));
  }
}

TEST_OF_BACKENDS(checksums, a_full_queue_does_not_keep_a_page_from_its_transfer) {
  // As many pieces as the engine takes are under way: reads whose page is away end well. The twin:
  // one piece of data more is refused.
  IoOptions options;
  options.kind = kind;
  options.max_pieces = 2;
  IoEngine engine(options);
  const std::size_t nbytes = kChecksumNbytes, each = nbytes + SumTable::nbytes_of(nbytes);
  const std::string path = concat("full-", getpid());
  const auto volume = Volume::of(engine.create_file(path, 2 * each));
  const auto cache = std::make_shared<SumCache>(1);
  Random random(92);
  const Memory source(nbytes, random), target(nbytes), more(nbytes);
  Extent extent = Extent::in_volume(volume, 0, nbytes, cache),
         other = Extent::in_volume(volume, each, nbytes, cache);
  for (Extent* written : {&extent, &other}) wait(written->write(engine, 0, source.span));
  const auto held = std::make_shared<Ticket>(1);
  const TicketPtr waiting = other.read(engine, 0, more.span, held),
                  read = extent.read(engine, 0, target.span, held);
  said_by<UsageError>([&] { other.read(engine, 0, more.span); });
  held->part_done();
  wait(read);
  wait(waiting);
  CHECK(same(source.span, target.span) && same(source.span, more.span));
  unlink(path.c_str());
}

// Notes what it is given and by whom; throws at one piece, if told so.
struct Noted : PieceWork {
  void look_at(Span piece) override {
    {
      std::lock_guard<std::mutex> lock(mutex);
      nbytes += piece.nbytes, ++pieces;
      threads.insert(std::this_thread::get_id());
    }
    if (together) {  // holds a thread until another has come, too
      for (int i = 0; i < 20'000 && others() < 2; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (piece.data == bad) throw 7;  // not even an exception
  }
  std::size_t others() {
    std::lock_guard<std::mutex> lock(mutex);
    return threads.size();
  }
  std::mutex mutex;
  std::size_t nbytes = 0, pieces = 0;
  std::set<std::thread::id> threads;
  bool together = false;
  const std::byte* bad = nullptr;
};

TEST_OF_BACKENDS(checksums, work_is_done_once_on_each_piece_by_threads_of_its_own) {
  // Reads and writes eight pieces: each is given once, to at least two threads, none of which asked
  // or waited. Without work (the twin) nobody looks.
  const Disk disk(kind);
  const std::size_t nbytes = 8 * 4 * kBlockNbytes;
  const Memory memory(nbytes);
  for (Op op : {Op::kWrite, Op::kRead}) {
    const auto noted = std::make_shared<Noted>();
    noted->together = true;
    wait(disk.engine->submit({{op, disk.file, 0, memory.span, nullptr, noted}}));
    CHECK(noted->pieces == 8 && noted->nbytes == nbytes, noted->pieces, " pieces of ",
          noted->nbytes, " bytes");
    CHECK(noted->threads.size() >= 2 && noted->threads.count(std::this_thread::get_id()) == 0);
    wait(disk.engine->submit({{op, disk.file, 0, memory.span}}));
    CHECK(noted->pieces == 8);
  }
}

TEST_OF_BACKENDS(checksums, work_that_throws_fails_its_ticket_and_nothing_else) {
  // Throws an int at the third of eight pieces. A read of it fails, a write of it leaves that piece
  // as it was; what comes next on the same threads is served.
  Random random(84);
  const Disk disk(kind);
  const std::size_t piece = 4 * kBlockNbytes;
  const Memory source(8 * piece, random), target(8 * piece);
  for (Op op : {Op::kWrite, Op::kRead}) {
    const auto noted = std::make_shared<Noted>();
    const Span span = op == Op::kWrite ? source.span : target.span;
    noted->bad = span.data + 2 * piece;
    thrown_by<int>(disk.engine->submit({{op, disk.file, 0, span, nullptr, noted}}));
    CHECK(noted->pieces == 8);
    if (op == Op::kWrite) CHECK(disk.raw(2 * piece, piece) == std::string(piece, '\0'));
    noted->bad = nullptr;
    wait(disk.engine->submit({{op, disk.file, 0, span, nullptr, noted}}));
    CHECK(disk.raw(0, 8 * piece) == source.bytes());
  }
}

TEST(checksums, a_piece_that_never_comes_is_an_error_in_time) {
  // The third of sixteen pieces hangs. The others are verified meanwhile, the ticket fails with the
  // timeout, and a read of another file on the same engine is verified after it, wrong or right.
  for (const std::string& kind : {std::string("uring"), std::string("threads")}) {
    std::string why;
    if (kind == "uring" && !make_uring_backend(4, why)) continue;
    IoOptions options;
    options.kind = kind;
    options.block_nbytes = 2 * kBlockNbytes;
    options.timeout_seconds = 0.3;
    options.work_threads = 2;
    FaultPlan faults;
    faults.hang = 1, faults.first_piece = 2, faults.file = 0;
    options.layer = layer_of(faults);
    // Never destroyed: what hangs would be left behind.
    IoEngine& engine = *new IoEngine(options);
    for (const char* name : {"hung-", "sound-"}) engine.create_file(name + kind, kMib);
    static const Memory hung(2 * kChecksumNbytes), sound(2 * kChecksumNbytes);
    const Extent first = Extent::in_file(0, 0, hung.span.nbytes),
                 second = Extent::in_file(1, 0, sound.span.nbytes);
    const StorageError error = thrown_by<StorageError>(first.read(engine, 0, hung.span));
    CHECK(error.error_number == ETIMEDOUT && has(error.what(), "hung-" + kind), error.what());
    wait(second.read(engine, 0, sound.span));
    std::fstream((std::string("sound-") + kind).c_str(),
                 std::ios::in | std::ios::out | std::ios::binary)
        .put('x');
    thrown_by<CorruptionError>(second.read(engine, 0, sound.span));
    for (const char* name : {"hung-", "sound-"}) unlink((name + kind).c_str());
  }
}

TEST_OF_BACKENDS(checksums, transfers_of_many_threads_are_verified_and_cancelled_at_once) {
  // Four threads write their own extents anew and read them, now and then cancelled, through short,
  // late and reordered transfers: no read that ends well has other bytes than the last that were
  // written, and the engine ends with nothing under way. Two extents have tables, and one page.
  FaultPlan plan = fault_plan(85);
  plan.short_transfer = plan.delay = plan.reorder = 0.3;
  const Disk disk(kind, &plan, 5 * kBlockNbytes, 8, 8 * kMib);
  const auto cache = std::make_shared<SumCache>(1);
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<std::string> failures;
  for (std::size_t mine = 0; mine < 4; ++mine)
    threads.emplace_back([&, mine] {
      try {
        Random random(86 + mine);
        const std::size_t nbytes = 3 * kChecksumNbytes;
        Extent extent = Extent::in_volume(Volume::of(disk.file), mine * 2 * kMib, nbytes,
                                          mine % 2 ? cache : nullptr);
        const auto source = std::make_shared<Memory>(nbytes),
                   target = std::make_shared<Memory>(nbytes);
        for (int round = 0; round < 12; ++round) {
          random.fill(source->span);
          wait(extent.write(*disk.engine, 0, source->span, source));
          const TicketPtr read = extent.read(*disk.engine, 0, target->span, nullptr, target);
          if (round % 3 == 2) disk.engine->cancel(read);
          try {
            wait(read);
            CHECK(same(source->span, target->span));
          } catch (const StorageError& error) {
            CHECK(error.error_number == ECANCELED && round % 3 == 2, error.what());
          }
        }
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(mutex);
        failures.push_back(error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(failures.empty(), failures.empty() ? "" : failures.front());
}

TEST_OF_BACKENDS(checksums, memory_that_runs_out_loses_no_page) {
  // Three extents share memory for one page of their checksums, so that each use sends another's
  // page to the disk. A write and a read meet a shortage at each allocation. What failed is made
  // again; the pages of the others are still there, and nothing waits for ever.
  Random random(90);
  const std::size_t nbytes = 2 * kChecksumNbytes;
  const Disk disk(kind);
  const auto cache = std::make_shared<SumCache>(1);
  const Memory source(3 * nbytes, random), target(nbytes);
  std::vector<Extent> extents;
  for (std::size_t i = 0; i < 3; ++i) {
    extents.push_back(Extent::in_volume(Volume::of(disk.file),
                                        i * (nbytes + SumTable::nbytes_of(nbytes)), nbytes, cache));
    wait(extents[i].write(*disk.engine, 0, source.part(i * nbytes, nbytes)));
  }
  std::size_t turn = 0;
  each_shortage([&](Shortage& shortage) {
    const std::size_t writes = turn++ % 3, reads = (writes + 1) % 3;
    const Span bytes = source.part(writes * nbytes, nbytes);
    TicketPtr written, read;
    const bool is_done = shortage.survived([&] {
      written = extents[writes].write(*disk.engine, 0, bytes);
      wait(written);
      read = extents[reads].read(*disk.engine, 0, target.span);
      wait(read);
    });
    CHECK((!written || written->done()) && (!read || read->done()));
    if (is_done) CHECK(same(target.span, source.part(reads * nbytes, nbytes)));
    if (written && !written->succeeded()) wait(extents[writes].write(*disk.engine, 0, bytes));
    for (std::size_t i = 0; i < 3; ++i) {
      wait(extents[i].read(*disk.engine, 0, target.span));
      CHECK(same(target.span, source.part(i * nbytes, nbytes)), "allocation ", shortage.first());
    }
  });
}

}  // namespace
}  // namespace infinity::tests
