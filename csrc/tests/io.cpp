// The I/O engine and extents: the right bytes or a typed error, each ticket finished once, nothing
// left behind.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>

#include "tests/disk.h"
#include "tests/scarce.h"

// In place of liburing's, if that is not linked in: the kernel refuses while `kernel_refuses`.
static std::atomic<bool> kernel_refuses{false};
static std::atomic<int> refused{0};

extern "C" __attribute__((weak)) int io_uring_submit(struct io_uring* ring) {
  if (kernel_refuses) {
    ++refused;
    return -EAGAIN;
  }
  static const auto of_library =
      reinterpret_cast<int (*)(struct io_uring*)>(dlsym(RTLD_NEXT, "io_uring_submit"));
  return of_library(ring);
}

namespace infinity::tests {
namespace {

constexpr std::size_t kBlock = 4 * kBlockNbytes;  // Disk's default piece

// --- bytes that are written come back ---

TEST_OF_BACKENDS(io, requests_of_every_size_come_back) {
  // Sizes below, at and over the piece and its multiples, at the file's first and last bytes; the
  // file agrees.
  Random random(41);
  for (std::size_t block : {kBlockNbytes, 3 * kBlockNbytes, kMib})
    for (std::size_t nbytes :
         {kBlockNbytes, 2 * kBlockNbytes, 3 * kBlockNbytes, 4 * kBlockNbytes, 9 * kBlockNbytes,
          kMib - kBlockNbytes, kMib, kMib + kBlockNbytes, 2 * kMib}) {
      const Disk disk(kind, nullptr, block, 8, 2 * kMib);
      for (std::uint64_t offset : {std::uint64_t{0}, disk.nbytes - nbytes}) {
        const Memory source(nbytes, random), target(nbytes);
        wait(disk.write(offset, source.span));
        wait(disk.read(offset, target.span));
        CHECK(same(source.span, target.span), nbytes, " bytes at ", offset, " in pieces of ",
              block);
        CHECK(disk.raw(offset, nbytes) == source.bytes());
        if (nbytes == disk.nbytes) break;
      }
      CHECK(disk.engine->file(disk.file).nbytes == disk.nbytes);
    }
}

TEST_OF_BACKENDS(io, a_request_touches_only_its_place) {
  // Overwrites pages inside known bytes; its neighbours in the file and in memory stay.
  Random random(42);
  const Disk disk(kind);
  const Memory before(2 * kMib, random), target(2 * kMib);
  wait(disk.write(0, before.span));
  for (int round = 0; round < 20; ++round) {
    const std::size_t at = random.below(400) * kBlockNbytes,
                      nbytes = (1 + random.below(100)) * kBlockNbytes;
    random.fill(before.part(at, nbytes));
    wait(disk.write(at, before.part(at, nbytes)));
  }
  wait(disk.read(0, target.span));
  CHECK(same(before.span, target.span));
  std::memset(target.span.data, 7, target.span.nbytes);
  wait(disk.read(5 * kBlockNbytes, target.part(9 * kBlockNbytes, kBlock + kBlockNbytes)));
  const Span read = target.part(9 * kBlockNbytes, kBlock + kBlockNbytes);
  CHECK(same(read, before.part(5 * kBlockNbytes, read.nbytes)));
  CHECK(std::to_integer<int>(read.data[-1]) == 7 &&
        std::to_integer<int>(read.data[read.nbytes]) == 7);
}

TEST_OF_BACKENDS(io, requests_of_one_ticket_all_arrive) {
  // One submission of 30 requests scattered over two files, read back by another in another order.
  Random random(43);
  const Disk disk(kind, nullptr, kBlock, 3);
  const std::string other_path = disk.path + "-other";
  const int other = disk.engine->create_file(other_path, kMib);
  unlink(other_path.c_str());
  const Memory source(30 * kBlockNbytes, random), target(30 * kBlockNbytes);
  std::vector<Request> writes, reads;
  for (std::size_t i = 0; i < 30; ++i) {
    const Request write{Op::kWrite, i % 2 ? disk.file : other, i * 3 * kBlockNbytes,
                        source.part(i * kBlockNbytes, kBlockNbytes)};
    writes.push_back(write);
    reads.push_back(
        {Op::kRead, write.file, write.offset, target.part(i * kBlockNbytes, kBlockNbytes)});
  }
  random.shuffle(reads);
  wait(disk.engine->submit(writes));
  wait(disk.engine->submit(reads));
  CHECK(same(source.span, target.span));
}

TEST_OF_BACKENDS(io, registered_memory_gives_the_same_bytes) {
  // Moves bytes inside, outside and across the edge of registered memory, and to a file made after
  // registration.
  Random random(44);
  const Disk disk(kind);
  const Memory memory(kMib);
  disk.engine->register_files_and_buffers({memory.part(0, kMib / 2)});
  const std::string later_path = disk.path + "-later";
  const int later = disk.engine->create_file(later_path, kMib);
  unlink(later_path.c_str());
  for (int round = 0; round < 2; ++round) {
    for (int file : {disk.file, later})
      for (std::size_t at : {std::size_t{0}, kMib / 2 - kBlockNbytes, kMib / 2}) {
        const Span span = memory.part(at, 5 * kBlockNbytes);
        random.fill(span);
        const std::string expected(reinterpret_cast<char*>(span.data), span.nbytes);
        wait(disk.engine->submit({{Op::kWrite, file, 0, span}}));
        std::memset(span.data, 0, span.nbytes);
        wait(disk.engine->submit({{Op::kRead, file, 0, span}}));
        CHECK(expected == std::string(reinterpret_cast<char*>(span.data), span.nbytes), "at ", at);
      }
    disk.engine->register_files_and_buffers({memory.span});  // again, with both files
  }
}

TEST_OF_BACKENDS(io, bytes_moved_are_counted_once) {
  // Three writes and one read, in short transfers.
  FaultPlan plan = fault_plan(45);
  plan.short_transfer = 0.7;
  const Disk disk(kind, &plan);
  const Memory memory(kMib);
  for (int i = 0; i < 3; ++i) wait(disk.write(0, memory.span));
  wait(disk.read(kMib, memory.span));
  CHECK(disk.engine->totals(Op::kWrite).nbytes == 3 * kMib &&
        disk.engine->totals(Op::kRead).nbytes == kMib);
  CHECK(disk.engine->totals(Op::kRead).busy_seconds > 0);
}

// --- order ---

TEST_OF_BACKENDS(io, tickets_may_be_waited_for_in_any_order) {
  // Sixty writes, then sixty reads, in a queue of three, waited for in a shuffled order.
  Random random(51);
  const Disk disk(kind, nullptr, kBlock, 3);
  const Memory source(4 * kMib, random), target(4 * kMib);
  const std::size_t nbytes = 17 * kBlockNbytes;
  std::vector<int> order;
  for (int i = 0; i < 60; ++i) order.push_back(i);
  for (bool write : {true, false}) {
    std::vector<TicketPtr> tickets;
    for (int i = 0; i < 60; ++i)
      tickets.push_back(write ? disk.write(i * nbytes, source.part(i * nbytes, nbytes))
                              : disk.read(i * nbytes, target.part(i * nbytes, nbytes)));
    random.shuffle(order);
    for (int i : order) wait(tickets[i]);
    for (const TicketPtr& ticket : tickets) CHECK(ticket->done());
  }
  CHECK(same(source.part(0, 60 * nbytes), target.part(0, 60 * nbytes)));
}

TEST_OF_BACKENDS(io, several_threads_may_submit_and_wait) {
  // Four threads write and read regions of their own, with late and reordered results.
  FaultPlan plan = fault_plan(52);
  plan.delay = 0.05, plan.reorder = 0.3;
  const Disk disk(kind, &plan, kBlockNbytes, 5);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t id = 0; id < 4; ++id)
    threads.emplace_back([&, id] {
      Random random(60 + id);
      const Memory source(6 * kBlockNbytes), target(6 * kBlockNbytes);
      for (int round = 0; round < 15; ++round) {
        random.fill(source.span);
        const TicketPtr written = disk.write(id * kMib, source.span);
        wait(disk.read(id * kMib, target.span, written));
        wrong += !same(source.span, target.span);
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_OF_BACKENDS(io, what_comes_after_sees_what_came_before) {
  // Chains of a write, a read, a write of what was read to another place, and a read there; results
  // late, reordered.
  FaultPlan plan = fault_plan(53);
  plan.delay = 0.1, plan.reorder = 0.4;
  const Disk disk(kind, &plan, kBlockNbytes);
  Random random(53);
  const std::size_t nbytes = 5 * kBlockNbytes;
  const Memory source(8 * nbytes, random), middle(8 * nbytes), target(8 * nbytes);
  std::vector<TicketPtr> tickets;
  for (std::size_t i = 0; i < 8; ++i) {
    TicketPtr ticket = disk.write(i * nbytes, source.part(i * nbytes, nbytes));
    ticket = disk.read(i * nbytes, middle.part(i * nbytes, nbytes), ticket);
    ticket = disk.write(kMib + i * nbytes, middle.part(i * nbytes, nbytes), ticket);
    tickets.push_back(disk.read(kMib + i * nbytes, target.part(i * nbytes, nbytes), ticket));
  }
  for (const TicketPtr& ticket : tickets) wait(ticket);
  CHECK(same(source.span, target.span));
}

TEST_OF_BACKENDS(io, what_comes_after_a_failure_fails_with_its_error_and_moves_nothing) {
  // Chains reads behind one that meets EIO, on the same engine and on a healthy one; the twin reads
  // without a chain.
  FaultPlan plan = fault_plan(54);
  plan.eio = 1;
  const Disk failing(kind, &plan), healthy(kind);
  Random random(54);
  const Memory source(kBlock, random), target(kBlock);
  wait(healthy.write(0, source.span));
  const TicketPtr first = failing.read(0, target.span),
                  second = healthy.read(0, target.span, first);
  for (const TicketPtr& ticket : {healthy.read(0, target.span, second), second, first}) {
    const StorageError error = thrown_by<StorageError>(ticket);
    CHECK(error.error_number == EIO && error.path == failing.path, error.what());
  }
  CHECK(target.all_zero());
  wait(healthy.read(0, target.span));
  CHECK(same(source.span, target.span));
}

TEST_OF_BACKENDS(io, a_completion_may_submit) {
  // Each completion starts the next of thirty reads, on the engine's own thread; the last one
  // tells.
  Random random(55);
  const Disk disk(kind, nullptr, kBlock, 1);
  const Memory source(30 * kBlockNbytes, random), target(30 * kBlockNbytes);
  wait(disk.write(0, source.span));
  const auto last = std::make_shared<Ticket>(1);
  std::function<void(std::size_t)> next = [&](std::size_t i) {
    if (i == 30) return last->part_done();
    disk.read(i * kBlockNbytes, target.part(i * kBlockNbytes, kBlockNbytes))
        ->on_done(
            [&, i](std::exception_ptr error) { error ? last->part_done(error) : next(i + 1); });
  };
  next(0);
  wait(last);
  CHECK(same(source.span, target.span));
}

TEST(io, ticket_finishes_once_with_its_first_error) {
  // Three parts, two of them wrong, and callbacks attached before and after.
  Ticket ticket(3);
  int calls = 0;
  std::exception_ptr seen;
  const auto callback = [&](std::exception_ptr error) { ++calls, seen = error; };
  ticket.on_done(callback);
  ticket.part_done();
  ticket.part_done(std::make_exception_ptr(UsageError("first")));
  CHECK(!ticket.done() && !ticket.wait_for(0.001) && calls == 0);
  ticket.part_done(std::make_exception_ptr(UsageError("second")));
  CHECK(ticket.done() && ticket.wait_for(0) && calls == 1 && seen);
  ticket.on_done(callback);
  CHECK(calls == 2);
  for (int i = 0; i < 2; ++i) CHECK(said_by<UsageError>([&] { ticket.wait(); }) == "first");
}

// --- faults that must not show ---

TEST_OF_BACKENDS(io, short_late_and_reordered_transfers_give_the_same_bytes) {
  // Writes and reads twelve requests at once under each fault and all of them.
  Random random(61);
  for (int fault = 0; fault < 4; ++fault) {
    FaultPlan plan = fault_plan(61 + fault);
    plan.short_transfer = fault == 0 ? 1 : fault == 3 ? 0.6 : 0;
    plan.delay = fault == 1 ? 0.3 : fault == 3 ? 0.1 : 0;
    plan.reorder = fault == 2 ? 0.8 : fault == 3 ? 0.5 : 0;
    const Disk disk(kind, &plan, 5 * kBlockNbytes, 4);
    const Memory source(4 * kMib, random), target(4 * kMib);
    for (bool write : {true, false}) {
      std::vector<TicketPtr> tickets;
      std::size_t at = 0;
      for (std::size_t i = 0; i < 12; ++i) {
        const std::size_t nbytes = (1 + 7 * i) * kBlockNbytes;
        tickets.push_back(write ? disk.write(at, source.part(at, nbytes))
                                : disk.read(at, target.part(at, nbytes)));
        at += nbytes;
      }
      for (const TicketPtr& ticket : tickets) wait(ticket);
      if (!write) CHECK(same(source.part(0, at), target.part(0, at)), "fault ", fault);
    }
  }
}

// --- faults that must show ---

TEST_OF_BACKENDS(io, a_refused_piece_is_a_typed_error_and_the_engine_serves_on) {
  // About a third of all pieces fail; every request has its error, with place and path, or its
  // bytes.
  Random random(71);
  for (bool full : {false, true}) {
    FaultPlan plan = fault_plan(71);
    (full ? plan.enospc : plan.eio) = 0.3;
    const Disk disk(kind, &plan, kBlock);
    const Memory source(40 * kBlock, random);
    std::vector<TicketPtr> tickets;
    for (std::size_t i = 0; i < 40; ++i)
      tickets.push_back(disk.write(i * kBlock, source.part(i * kBlock, kBlock)));
    int refused = 0;
    for (std::size_t i = 0; i < 40; ++i) {
      try {
        wait(tickets[i]);
        const Span part = source.part(i * kBlock, kBlock);
        CHECK(disk.raw(i * kBlock, kBlock) ==
              std::string(reinterpret_cast<char*>(part.data), kBlock));
      } catch (const StorageError& error) {
        ++refused;
        CHECK(error.error_number == (full ? ENOSPC : EIO) && error.path == disk.path, error.what());
        CHECK(
            has(error.what(), concat("write of ", kBlock, " bytes at offset ", i * kBlock, " of ")),
            error.what());
      }
    }
    CHECK(refused > 0 && refused < 40, refused);
  }
}

TEST_OF_BACKENDS(io, a_ticket_waits_for_all_its_pieces_even_when_one_fails) {
  // The first piece fails at once, the others come late: when the ticket is finished nobody writes
  // to memory.
  FaultPlan plan = fault_plan(72);
  plan.eio = 0.2, plan.delay = 1, plan.delay_seconds = 0.002;
  const Disk disk(kind, &plan, kBlockNbytes, 16);
  for (int round = 0; round < 5; ++round) {
    auto target = std::make_unique<Memory>(16 * kBlockNbytes);
    thrown_by<StorageError>(disk.read(0, target->span));
    target.reset();  // unmapped: a late piece would fail with EFAULT or crash
  }
}

TEST_OF_BACKENDS(io, lost_writes_and_flipped_bits_fail_the_checksum) {
  // The disk lies; the engine alone does not see it (the twin), the extent does. Without faults it
  // verifies.
  for (int fault = 0; fault < 3; ++fault) {
    FaultPlan plan = fault_plan(73);
    plan.lost_write = fault == 1, plan.bit_flip = fault == 2;
    const Disk disk(kind, &plan);
    Random random(73);
    const std::size_t nbytes = 2 * kChecksumNbytes + kBlockNbytes;
    const Memory source(nbytes, random), target(nbytes);
    Extent extent = Extent::in_file(disk.file, kBlockNbytes, nbytes);
    extent.remember(0, source.span, *disk.engine);
    wait(disk.engine->submit(extent.requests(Op::kWrite, 0, source.span)));
    wait(disk.engine->submit(extent.requests(Op::kRead, 0, target.span)));
    CHECK(same(source.span, target.span) == (fault == 0), "fault ", fault);
    if (fault == 0) {
      extent.verify(0, target.span, *disk.engine);
      continue;
    }
    const std::string said =
        said_by<CorruptionError>([&] { extent.verify(0, target.span, *disk.engine); });
    CHECK(has(said, disk.path) && has(said, "offset 4096 "), said);
  }
}

TEST_OF_BACKENDS(io, checksums_of_unknown_bytes_are_taken_as_they_are_read) {
  // Bytes that somebody else wrote, read in two transfers in either order: the sum is theirs, and
  // holds for what is read later. The twin: of an extent whose bytes count as known, that is
  // corruption.
  Random random(75);
  const Disk disk(kind);
  const std::size_t nbytes = 5 * kChecksumNbytes + kBlockNbytes, first = 2 * kChecksumNbytes;
  const Memory source(nbytes, random), target(nbytes);
  wait(disk.engine->submit(
      Extent::in_file(disk.file, 0, nbytes).requests(Op::kWrite, 0, source.span)));
  const Extent extent = Extent::unknown(disk.file, 0, nbytes),
               known = Extent::in_file(disk.file, 0, nbytes);
  wait(extent.read(*disk.engine, first, target.part(first, nbytes - first)));
  wait(extent.read(*disk.engine, 0, target.part(0, first)));
  CHECK(same(source.span, target.span));
  CHECK(extent.checksum(nbytes) == crc32c(source.span.data, nbytes));
  extent.verify(0, target.span, *disk.engine);
  CHECK(has(said_by<CorruptionError>([&] { wait(known.read(*disk.engine, 0, target.span)); }),
            disk.path));
}

TEST_OF_BACKENDS(io, a_bit_flipped_on_disk_is_found_at_its_place) {
  // Another process flips a bit of the third block: that block alone fails, and its offset is told.
  Random random(74);
  const Disk disk(kind);
  const Memory source(5 * kChecksumNbytes, random), target(5 * kChecksumNbytes);
  Extent extent = Extent::in_file(disk.file, kChecksumNbytes, 5 * kChecksumNbytes);
  extent.remember(0, source.span, *disk.engine);
  wait(disk.engine->submit(extent.requests(Op::kWrite, 0, source.span)));
  disk.flip(3 * kChecksumNbytes + 1234);
  for (std::size_t block = 0; block < 5; ++block) {
    const Span part = target.part(block * kChecksumNbytes, kChecksumNbytes);
    wait(disk.engine->submit(extent.requests(Op::kRead, block * kChecksumNbytes, part)));
    const auto verify = [&] { extent.verify(block * kChecksumNbytes, part, *disk.engine); };
    if (block == 2)
      CHECK(has(said_by<CorruptionError>(verify), concat("offset ", 3 * kChecksumNbytes, " ")));
    else
      verify();
  }
}

TEST_OF_BACKENDS(io, a_truncated_file_is_corruption) {
  // Cuts the file inside the second block: reads over the end fail, those before it do not, writes
  // make it whole.
  Random random(75);
  const Disk disk(kind);
  const Memory source(4 * kBlock, random), target(4 * kBlock);
  wait(disk.write(0, source.span));
  for (std::size_t kept : {kBlock + 100, kBlock, std::size_t{0}}) {
    CHECK(truncate(disk.path.c_str(), static_cast<off_t>(kept)) == 0);
    const std::string said = thrown_by<CorruptionError>(disk.read(0, target.span)).what();
    CHECK(has(said, disk.path) && has(said, "truncated"), said);
    if (kept < kBlock) continue;
    wait(disk.read(0, target.part(0, kBlock)));
    CHECK(same(source.part(0, kBlock), target.part(0, kBlock)));
  }
  wait(disk.write(0, source.span));
  wait(disk.read(0, target.span));
  CHECK(same(source.span, target.span));
}

TEST(io, a_device_that_does_not_answer_is_an_error_in_time) {
  // The third piece of a file never comes back: its ticket and every later one of that file fail in
  // time.
  for (const std::string& kind : {std::string("uring"), std::string("threads")}) {
    std::string why;
    if (kind == "uring" && !make_uring_backend(4, why)) continue;
    IoOptions options;
    options.kind = kind;
    options.timeout_seconds = 0.2;
    FaultPlan faults;
    faults.hang = 1, faults.first_piece = 2;
    options.layer = layer_of(faults);
    // Never destroyed: what hangs would be left behind.
    IoEngine& engine = *new IoEngine(options);
    const int file = engine.create_file("hung-" + kind, kMib);
    unlink(("hung-" + kind).c_str());
    static const Memory memory(kBlock);
    const Request request{Op::kWrite, file, 0, memory.span};
    for (int i = 0; i < 2; ++i) wait(engine.submit({request}));  // the twin
    for (int i = 0; i < 3; ++i) {
      const StorageError error = thrown_by<StorageError>(engine.submit({request}));
      CHECK(error.error_number == ETIMEDOUT && has(error.what(), "hung-" + kind), error.what());
    }
  }
}

// A page that no read into it gets past until it is given: what a hung device is to the thread that
// asked it.
class MissingPage {
 public:
  MissingPage() {
    descriptor_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC));
    uffdio_api api{};
    api.api = UFFD_API;
    if (descriptor_ < 0 || ioctl(descriptor_, UFFDIO_API, &api) != 0)
      throw Skipped(concat("userfaultfd is not permitted: ", std::strerror(errno)));
    void* page =
        mmap(nullptr, kBlockNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    span = {static_cast<std::byte*>(page), kBlockNbytes};
    uffdio_register range{};
    range.range = {reinterpret_cast<std::uintptr_t>(page), kBlockNbytes};
    range.mode = UFFDIO_REGISTER_MODE_MISSING;
    CHECK(ioctl(descriptor_, UFFDIO_REGISTER, &range) == 0, std::strerror(errno));
  }
  ~MissingPage() {
    close(descriptor_);
    munmap(span.data, span.nbytes);
  }
  void give() {
    uffdio_zeropage zero{};
    zero.range = {reinterpret_cast<std::uintptr_t>(span.data), kBlockNbytes};
    CHECK(ioctl(descriptor_, UFFDIO_ZEROPAGE, &zero) == 0, std::strerror(errno));
  }

  Span span;

 private:
  int descriptor_ = -1;
};

TEST(io, a_hung_disk_is_not_blamed_on_the_one_beside_it) {
  // Two threads, both held by one disk, and more of it in the queue: the other disk's reads behind
  // it come in.
  MissingPage first, second;
  Random random(77);
  const Memory source(kBlock, random), target(kBlock), rest(kBlockNbytes);
  IoOptions options;
  options.kind = "threads";
  options.threads = 2;
  options.timeout_seconds = 0.4;
  // never destroyed: it may not know yet that the threads go on
  static IoEngine& engine = *new IoEngine(options);
  const int hung = engine.create_file("beside-hung", kMib),
            healthy = engine.create_file("beside-healthy", kMib);
  unlink("beside-hung"), unlink("beside-healthy");
  wait(engine.submit({{Op::kWrite, healthy, 0, source.span}}));
  std::vector<TicketPtr> of_hung;
  for (const Span& span : {first.span, second.span, rest.span, rest.span})
    of_hung.push_back(engine.submit({{Op::kRead, hung, 0, span}}));
  const TicketPtr of_healthy = engine.submit({{Op::kRead, healthy, 0, target.span}});
  for (const TicketPtr& ticket : of_hung) {
    const StorageError error = thrown_by<StorageError>(ticket);
    CHECK(error.error_number == ETIMEDOUT && has(error.what(), "beside-hung"), error.what());
  }
  wait(of_healthy);
  CHECK(same(source.span, target.span));
  first.give(), second.give();
}

TEST_OF_BACKENDS(io, what_is_cancelled_before_it_starts_moves_nothing) {
  // A queue of one, slow; cancels the third of five writes, a finished one and none at all: the
  // others arrive.
  FaultPlan plan = fault_plan(76);
  plan.delay = 1, plan.delay_seconds = 0.01;
  const Disk disk(kind, &plan, kBlock, 1);
  Random random(76);
  const Memory source(5 * kBlock, random);
  std::vector<TicketPtr> tickets;
  for (std::size_t i = 0; i < 5; ++i)
    tickets.push_back(disk.write(i * kBlock, source.part(i * kBlock, kBlock)));
  disk.engine->cancel(tickets[2]);
  CHECK(thrown_by<StorageError>(tickets[2]).error_number == ECANCELED);
  disk.engine->cancel(tickets[2]);
  for (std::size_t i : {0, 1, 3, 4}) {
    wait(tickets[i]);
    CHECK(disk.raw(i * kBlock, kBlock) == source.bytes().substr(i * kBlock, kBlock), "write ", i);
  }
  disk.engine->cancel(tickets[4]);
  tickets[4]->wait();
  CHECK(disk.raw(2 * kBlock, kBlock) == std::string(kBlock, '\0'));
}

// --- the end of an engine ---

TEST_OF_BACKENDS(io, an_engine_that_is_destroyed_finishes_what_it_was_given) {
  // Drops the engine with late writes in a queue of two and reads chained behind them; every ticket
  // finishes well.
  for (int round = 0; round < 4; ++round) {
    FaultPlan plan = fault_plan(81 + round);
    plan.delay = 0.3, plan.reorder = 0.3, plan.short_transfer = 0.3;
    Disk disk(kind, &plan, 2 * kBlockNbytes, 2);
    Random random(81 + round);
    const Memory source(20 * kBlock, random), target(20 * kBlock);
    std::vector<TicketPtr> tickets;
    for (std::size_t at = 0; at < source.span.nbytes; at += kBlock)
      tickets.push_back(
          disk.read(at, target.part(at, kBlock), disk.write(at, source.part(at, kBlock))));
    disk.engine.reset();
    for (const TicketPtr& ticket : tickets) CHECK(ticket->done());
    for (const TicketPtr& ticket : tickets) ticket->wait();
    CHECK(same(source.span, target.span));
  }
}

TEST_OF_BACKENDS(io, an_engine_that_is_destroyed_finishes_what_fails_too) {
  // The same with every piece refused.
  FaultPlan plan = fault_plan(85);
  plan.eio = 1;
  Disk disk(kind, &plan, kBlockNbytes, 2);
  const Memory memory(8 * kBlock);
  std::vector<TicketPtr> tickets;
  for (std::size_t at = 0; at < memory.span.nbytes; at += kBlock)
    tickets.push_back(
        disk.read(at, memory.part(at, kBlock), disk.write(at, memory.part(at, kBlock))));
  disk.engine.reset();
  for (const TicketPtr& ticket : tickets) {
    CHECK(ticket->done());
    thrown_by<StorageError>(ticket);
  }
}

TEST_OF_BACKENDS(io, an_engine_that_is_destroyed_waits_for_what_its_requests_come_after) {
  // A read stands behind a ticket that another thread finishes while the engine is being dropped.
  Disk disk(kind);
  Random random(86);
  const Memory source(kBlock, random), target(kBlock);
  wait(disk.write(0, source.span));
  const auto gate = std::make_shared<Ticket>(1);
  const TicketPtr read = disk.read(0, target.span, gate);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate->part_done();
  });
  disk.engine.reset();
  opener.join();
  CHECK(read->done());
  CHECK(same(source.span, target.span));
}

TEST_OF_BACKENDS(io, engines_come_and_go) {
  // Thirty engines without and with one transfer; descriptors and threads are as before.
  const Memory memory(kBlock);
  for (int i = 0; i < 30; ++i) {
    Disk disk(kind);
    if (i % 2) disk.read(0, memory.span);  // nobody waits for it
    disk.engine.reset();
  }
}

TEST(io, what_stays_behind_is_seen) {
  // The twin of every case above: a descriptor and a thread that stay are found, and found gone.
  std::thread([] {}).join();
  const Resources before;
  const int descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);
  said_by<Failed>([&] { before.check_nothing_leaked(); });
  close(descriptor);
  Ticket gate(1);
  std::thread thread([&] { gate.wait(); });
  const std::string said = said_by<Failed>([&] { before.check_nothing_leaked(); });
  gate.part_done();
  thread.join();
  CHECK(has(said, "threads became"), said);
  before.check_nothing_leaked();
}

// --- what cannot be served ---

TEST_OF_BACKENDS(io, unusable_requests_are_refused_with_their_numbers_and_change_nothing) {
  // Misaligned, empty, outlying and unknown ones, alone and behind a good one of the same
  // submission.
  Random random(91);
  const Disk disk(kind);
  const Memory source(4 * kMib, random), memory(2 * kBlock);
  wait(disk.write(0, source.span));
  const Span good = memory.part(0, kBlock);
  const std::uint64_t end = disk.nbytes;
  struct Wrong {
    int file;
    std::uint64_t offset;
    Span span;
    std::string tells;
  };
  const Wrong wrong[] = {
      {disk.file, 0, memory.part(8, kBlock), concat(kBlock, " bytes at offset 0")},
      {disk.file, 512, good, "offset 512"},
      {disk.file, 0, memory.part(0, kBlockNbytes + 1), "4097 bytes"},
      {disk.file, 0, memory.part(0, 0), "0 bytes"},
      {disk.file, end, good, concat("offset ", end)},
      {disk.file, end - kBlockNbytes, good, concat("offset ", end - kBlockNbytes)},
      {disk.file, ~std::uint64_t{0} - kBlockNbytes + 1, good, concat("which has ", end)},
      {disk.file,
       kBlockNbytes,
       {memory.span.data, ~std::size_t{0} - kBlockNbytes + 1},
       concat("which has ", end)},
      {7, 0, good, "no file 7"},
      {-1, 0, good, "no file -1"},
  };
  for (Op op : {Op::kRead, Op::kWrite})
    for (const Wrong& each : wrong) {
      const Request request{op, each.file, each.offset, each.span},
          fine{Op::kWrite, disk.file, 0, good};
      const auto finished = std::make_shared<Ticket>(0);
      for (const std::string& said :
           {said_by<UsageError>([&] { disk.engine->validate(request); }),
            said_by<UsageError>([&] { disk.engine->submit({request}); }),
            said_by<UsageError>([&] { disk.engine->submit({request}, finished); }),
            said_by<UsageError>([&] { disk.engine->submit({fine, request}); })})
        CHECK(has(said, each.tells), said);
    }
  said_by<UsageError>([&] { disk.engine->submit({}); });
  CHECK(memory.all_zero());
  CHECK(disk.raw(0, disk.nbytes) == source.bytes());
  wait(disk.read(end - kBlock, good));  // the twin: the last block is served
  CHECK(same(good, source.part(end - kBlock, kBlock)));
}

TEST_OF_BACKENDS(io, files_that_cannot_be_made_are_refused_and_not_left_behind) {
  // No folder, a file that is there already, no space, no whole blocks.
  Disk disk(kind);
  const auto make = [&](const std::string& path, std::uint64_t nbytes) {
    return [&, path, nbytes] { disk.engine->create_file(path, nbytes); };
  };
  CHECK(has(said_by<StorageError>(make("nowhere/swap", kMib)), "nowhere/swap"));
  CHECK(has(said_by<StorageError>(make(disk.path, kMib)), disk.path));
  CHECK(disk.raw(0, 1).size() == 1, "the file that was there is gone");
  const std::string huge = disk.path + "-huge";
  said_by<StorageError>(make(huge, std::uint64_t{1} << 60));
  CHECK(access(huge.c_str(), F_OK) != 0, "a file without its space was left behind");
  for (std::uint64_t nbytes : {0, 100, 4097})
    CHECK(has(said_by<UsageError>(make(huge, nbytes)), std::to_string(nbytes)));
  CHECK(has(said_by<UsageError>([&] { disk.engine->file(1); }), "no file 1"));
  struct stat status{};
  CHECK(stat(disk.path.c_str(), &status) == 0 && (status.st_mode & 0777) == 0600);
}

TEST_OF_BACKENDS(io, swap_files_have_no_name_and_give_their_space_back) {
  // Ten of them at once, each with bytes of its own; then their engine goes.
  Random random(77);
  const Disk disk(kind);
  const Memory memory(kMib, random), read(kMib);
  for (int i = 0; i < 10; ++i) {
    const int file = disk.engine->create_swap_file(".", kMib);
    random.fill(memory.span);
    wait(disk.engine->submit({{Op::kWrite, file, 0, memory.span}}));
    wait(disk.engine->submit({{Op::kRead, file, 0, read.span}}));
    CHECK(same(memory.span, read.span));
  }
  CHECK(has(said_by<StorageError>([&] { disk.engine->create_swap_file("nowhere", kMib); }),
            "nowhere"));
}

TEST_OF_BACKENDS(io, a_file_is_dropped_behind_what_was_begun_of_it) {
  // Late writes of a file fill the queue when it is dropped, and another file is made at once,
  // which would get its descriptor's number: every write is over, in its own file, and none is
  // accepted any more; what waited for something else is cancelled.
  FaultPlan slow = fault_plan(7);
  slow.delay = 1;
  slow.delay_seconds = 0.002;
  const Disk disk(kind, &slow, kBlockNbytes, 4, kMib), gate(kind, &slow, kBlockNbytes, 1, kMib);
  const Memory memory(kMib), target(kMib);
  std::fill_n(memory.span.data, kMib, std::byte{3});
  const TicketPtr first = gate.write(0, memory.part(0, 64 * kBlockNbytes));
  const TicketPtr written = disk.write(0, memory.part(0, kMib / 2));
  const TicketPtr dependent = disk.write(kMib / 2, memory.part(0, kBlockNbytes), first);
  disk.engine->drop_file(disk.file);
  const std::string other = disk.path + "-other";
  const int file = disk.engine->create_file(other, kMib);
  unlink(other.c_str());
  CHECK(disk.engine->open_files() == std::vector<int>{file});
  wait(written);
  CHECK(disk.raw(0, kMib / 2) == std::string(kMib / 2, '\3'),
        "writes of a file that was dropped are lost");
  CHECK(thrown_by<StorageError>(dependent).error_number == ECANCELED);
  CHECK(disk.raw(kMib / 2, kMib / 2) == std::string(kMib / 2, '\0'));
  wait(disk.engine->submit({{Op::kRead, file, 0, target.span}}));
  CHECK(target.all_zero(), "another file has the bytes of one that was dropped");
  CHECK(has(said_by<UsageError>([&] { disk.write(0, memory.part(0, kBlockNbytes)); }),
            "which has 0"));
  disk.engine->drop_file(disk.file);
}

TEST_OF_BACKENDS(io, a_file_that_was_dropped_is_open_nowhere) {
  // A lease to write is given for a file that nobody else has open: the kernel's table of
  // registered files would count.
  const Disk disk(kind);
  const Memory memory(kMib);
  disk.engine->register_files_and_buffers({memory.span});
  wait(disk.write(0, memory.span));
  const auto is_open = [&] {
    const int descriptor = open(disk.path.c_str(), O_RDWR | O_CLOEXEC);
    CHECK(descriptor >= 0);
    const bool refused = fcntl(descriptor, F_SETLEASE, F_WRLCK) != 0;
    const int error = errno;
    close(descriptor);
    if (refused && error != EAGAIN) throw Skipped("this file system has no leases");
    return refused;
  };
  CHECK(is_open());
  disk.engine->drop_file(disk.file);
  for (int i = 0; i < 500 && is_open(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(!is_open(), "a file that was dropped is open still");
  const int file = disk.engine->create_file(disk.path + "-later", kMib);
  unlink((disk.path + "-later").c_str());
  disk.engine->register_files_and_buffers({memory.span});
  wait(disk.engine->submit({{Op::kWrite, file, 0, memory.span}}));
}

TEST_OF_BACKENDS(io, options_without_sense_are_refused) {
  // Each alone; nothing stays of the engine that was not made.
  const auto refused = [&](auto change, const std::string& tells) {
    IoOptions options;
    options.kind = kind;
    change(options);
    const std::string said = said_by<UsageError>([&] { IoEngine engine(options); });
    CHECK(has(said, tells), said);
  };
  refused([](IoOptions& o) { o.kind = "tape"; }, "tape");
  refused([](IoOptions& o) { o.depth = 0; }, "depth 0");
  refused([](IoOptions& o) { o.depth = 5000; }, "5000");
  refused([](IoOptions& o) { o.block_nbytes = 0; }, "0 bytes");
  refused([](IoOptions& o) { o.block_nbytes = 6000; }, "6000");
  refused([](IoOptions& o) { o.threads = 0; }, "not 0");
}

TEST(io, extent_parts_are_whole_checksum_blocks_inside_it) {
  // Every part that is not; and that an extent in memory is no place on disk.
  const Disk disk("threads");
  Memory memory(2 * kMib);
  const std::size_t nbytes = 3 * kChecksumNbytes + kBlockNbytes;
  Extent extent = Extent::in_file(0, kBlockNbytes, nbytes);
  const auto refused = [&](std::size_t at, std::size_t length) {
    const std::string said =
        said_by<UsageError>([&] { extent.requests(Op::kRead, at, {memory.span.data, length}); });
    said_by<UsageError>([&] { extent.remember(at, {memory.span.data, length}, *disk.engine); });
    CHECK(has(said, std::to_string(nbytes)), said);
  };
  refused(kBlockNbytes, kChecksumNbytes);
  refused(0, kBlockNbytes);
  refused(0, nbytes + kChecksumNbytes);
  refused(3 * kChecksumNbytes, kChecksumNbytes);
  refused(4 * kChecksumNbytes, kChecksumNbytes);
  refused(kChecksumNbytes, ~std::size_t{0} - kChecksumNbytes + 1);
  CHECK(
      extent.requests(Op::kRead, 3 * kChecksumNbytes, memory.part(0, kBlockNbytes)).at(0).offset ==
      3 * kChecksumNbytes + kBlockNbytes);
  CHECK(extent.requests(Op::kRead, 0, memory.part(0, nbytes)).at(0).offset == kBlockNbytes);
  said_by<UsageError>([&] { Extent::in_memory(memory.span).requests(Op::kRead, 0, memory.span); });
  for (std::size_t odd : {std::size_t{0}, std::size_t{100}, kBlockNbytes + 1})
    said_by<UsageError>([&] { Extent::in_file(0, 0, odd); });
  said_by<UsageError>([&] { Extent::in_file(0, 512, kBlockNbytes); });
}

TEST_OF_BACKENDS(io, what_overlaps_a_write_comes_behind_it_though_nobody_waits) {
  // Sixty writes and reads of overlapping blocks, asked for at once, of a disk that answers late
  // and in another order. Writes have rising numbers: a read finds the last one before it, or a
  // later one, and in the end the last ones are there.
  FaultPlan faults = fault_plan(53);
  faults.delay = faults.reorder = 0.5;
  faults.delay_seconds = 0.002;
  const Disk disk(kind, &faults);
  Extent extent = Extent::in_file(disk.file, 0, 4 * kChecksumNbytes);
  struct Wanted {
    std::shared_ptr<Memory> memory;
    std::size_t at;
    std::byte value;
  };
  std::vector<Wanted> wanted;
  std::vector<TicketPtr> reads;
  Random random(54);
  std::byte last[4] = {};
  for (int i = 1; i <= 60; ++i) {
    const std::size_t block = random.below(4), count = 1 + random.below(4 - block);
    const auto memory = std::make_shared<Memory>(count * kChecksumNbytes);
    if (random.below(2) == 0) {
      std::fill_n(memory->span.data, memory->span.nbytes, static_cast<std::byte>(i));
      std::fill_n(last + block, count, static_cast<std::byte>(i));
      extent.write(*disk.engine, block * kChecksumNbytes, memory->span, memory);
    } else {
      // a write may pass it
      reads.push_back(
          extent.read(*disk.engine, block * kChecksumNbytes, memory->span, nullptr, memory, false));
      for (std::size_t each = 0; each < count; ++each)
        wanted.push_back({memory, each * kChecksumNbytes, last[block + each]});
    }
  }
  for (const TicketPtr& read : reads) wait(read);
  CHECK(wanted.size() > 20);
  for (const Wanted& each : wanted)
    CHECK(each.memory->span.data[each.at] >= each.value, "a read came before a write");
  const Memory whole(4 * kChecksumNbytes);
  wait(extent.read(*disk.engine, 0, whole.span));
  for (std::size_t block = 0; block < 4; ++block)
    CHECK(whole.span.data[block * kChecksumNbytes] == last[block], "block ", block);
}

TEST_OF_BACKENDS(io, reads_behind_a_write_that_failed_fail_until_the_place_is_written_anew) {
  // The first write meets EIO and nobody looks; a read behind it says so, and one behind the next
  // write is served.
  FaultPlan faults = fault_plan(55);
  faults.eio = 1;
  Disk failing(kind, &faults);
  Extent extent = Extent::in_file(failing.file, 0, kChecksumNbytes);
  const auto memory = std::make_shared<Memory>(kChecksumNbytes);
  const TicketPtr lost = extent.write(*failing.engine, 0, memory->span, memory);
  CHECK(said_by<StorageError>([&] {
          wait(extent.read(*failing.engine, 0, memory->span));
        }).find("write of") != std::string::npos);
  Disk healthy(kind);
  extent.write(*healthy.engine, 0, memory->span, memory);
  wait(extent.read(*healthy.engine, 0, memory->span));
}

// --- memory that runs out, and a kernel that refuses ---

TEST_OF_BACKENDS(io, memory_that_runs_out_fails_a_transfer_whole_and_no_other) {
  // Each allocation of a checked write and of a read fails in its turn, the caller's and those of
  // the engine's threads. A write that was refused at once has changed nothing; one that failed
  // later fails every read until the place is written anew. No ticket stays open, and the same
  // engine serves all.
  Random random(70);
  const std::size_t nbytes = kChecksumNbytes + 3 * kBlock;
  const Disk disk(kind);
  Extent extent = Extent::in_file(disk.file, kBlock, nbytes);
  const Memory before(nbytes, random), after(nbytes, random), target(nbytes);
  each_shortage([&](Shortage& shortage) {
    wait(extent.write(*disk.engine, 0, before.span));
    TicketPtr written;
    const bool is_done = shortage.survived([&] {
      written = extent.write(*disk.engine, 0, after.span);
      wait(written);
    });
    const auto read = [&] {
      const TicketPtr ticket = extent.read(*disk.engine, 0, target.span);
      wait(ticket);
    };
    if (written && !is_done) {
      CHECK(written->done(), "allocation ", shortage.first());
      said_by<std::bad_alloc>(read);
    } else {
      read();
      CHECK(same(target.span, is_done ? after.span : before.span), "allocation ", shortage.first());
    }
  });
  wait(extent.write(*disk.engine, 0, before.span));
  each_shortage([&](Shortage& shortage) {
    TicketPtr ticket;
    const bool is_done = shortage.survived([&] {
      ticket = extent.read(*disk.engine, 0, target.span);
      wait(ticket);
    });
    CHECK(!ticket || ticket->done());
    if (!is_done) wait(extent.read(*disk.engine, 0, target.span));
    CHECK(same(target.span, before.span), "allocation ", shortage.first());
    std::memset(target.span.data, 0, nbytes);
  });
}

TEST_OF_BACKENDS(io, memory_that_runs_out_leaves_no_submission_half_made) {
  // Writes of several pieces, behind a ticket and behind none, are refused at each allocation: then
  // none of their bytes moves, and the engine, which waits for all it has counted, ends.
  Random random(71);
  const Disk disk(kind, nullptr, kBlock);
  const Memory zeros(8 * kBlock), source(8 * kBlock, random), target(8 * kBlock);
  for (bool is_behind : {false, true})
    each_shortage([&](Shortage& shortage) {
      wait(disk.write(0, zeros.span));
      const auto before = std::make_shared<Ticket>(1);
      TicketPtr ticket;
      const bool is_done = shortage.survived([&] {
        ticket = disk.write(0, source.span, is_behind ? before : nullptr);
        before->part_done();
        wait(ticket);
      });
      if (!before->done()) before->part_done();
      CHECK(!ticket || ticket->done(), "allocation ", shortage.first());
      wait(disk.read(0, target.span));
      if (is_done || !ticket)
        CHECK(same(target.span, is_done ? source.span : zeros.span), "allocation ",
              shortage.first());
    });
}

TEST_OF_BACKENDS(io, memory_that_runs_out_leaves_no_engine_and_no_file_half_made) {
  // An engine and its first file are made with each allocation failing in its turn. The file is
  // made again by the same engine, serves transfers, and is dropped under the same shortage.
  // Nothing stays open, and nothing on the disk.
  Random random(72);
  const Memory source(4 * kBlock, random), target(4 * kBlock);
  IoOptions options;
  options.kind = kind;
  options.depth = 4;
  options.threads = 2;
  const std::string path = concat("swap-", getpid(), "-scarce");
  each_shortage([&](Shortage& shortage) {
    shortage.survived([&] {
      try {
        IoEngine engine(options);
      } catch (const StorageError& error) {  // as where the system refuses a thread
        if (error.error_number != EAGAIN) throw;
        throw std::bad_alloc();
      }
    });
  });
  each_shortage([&](Shortage& shortage) {
    IoEngine engine(options);
    int file = -1;
    if (!shortage.survived([&] { file = engine.create_file(path, kMib); }))
      file = engine.create_file(path, kMib);
    wait(engine.submit({{Op::kWrite, file, 0, source.span}}));
    wait(engine.submit({{Op::kRead, file, 0, target.span}}));
    CHECK(same(source.span, target.span), "allocation ", shortage.first());
    unlink(path.c_str());
  });
  IoEngine engine(options);
  const Resources without;
  each_shortage([&](Shortage& shortage) {
    const int file = engine.create_file(path, kMib);
    unlink(path.c_str());
    if (!shortage.survived([&] { engine.drop_file(file); })) engine.drop_file(file);
    CHECK(engine.open_files().empty());
  });
  without.check_nothing_leaked();
}

TEST(io, a_kernel_that_takes_no_transfers_for_a_while_is_asked_again) {
  // While the kernel has no memory for requests, submitting returns, the engine answers others, and
  // the device is not blamed, though it takes longer than one may. Then all transfers are made.
  need("uring");
  IoOptions options;
  options.kind = "uring";
  options.depth = 4;
  options.timeout_seconds = 0.2;
  IoEngine engine(options);
  const int file = engine.create_swap_file(".", 8 * kBlock);
  Random random(73);
  const Memory source(8 * kBlock, random), target(8 * kBlock);
  kernel_refuses = true;
  const TicketPtr written = engine.submit({{Op::kWrite, file, 0, source.span}});
  if (refused == 0) {
    kernel_refuses = false;
    wait(written);
    throw Skipped("liburing is linked in: its calls cannot be refused here");
  }
  CHECK(!written->wait_for(0.6) && engine.hung().empty() && engine.totals(Op::kWrite).nbytes == 0);
  kernel_refuses = false;
  wait(written);
  wait(engine.submit({{Op::kRead, file, 0, target.span}}));
  CHECK(same(source.span, target.span));
}

}  // namespace
}  // namespace infinity::tests
