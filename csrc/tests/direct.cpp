// Direct reads: whole and verified in one of two places, whatever the road does and however it is
// timed.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "base/crc32c.h"
#include "base/crc32c_pieces.h"
#include "io/direct.h"
#include "tests/disk.h"
#include "tests/scarce.h"

namespace infinity::tests {
namespace {

constexpr std::size_t kPlace = 2 * kChecksumNbytes;
constexpr double kLateSeconds = 0.02;

// Reads into memory of the host's, and fails by a seed.
class FaultyRoad final : public Road {
 public:
  FaultyRoad(std::uint64_t seed, std::uint64_t faults_in_eight)
      : random_(seed), faults_(faults_in_eight) {}
  const char* name() const override { return "faulty"; }
  void* open(const File& file, std::string*) override {
    ++opened;
    descriptor_ = file.descriptor;
    return this;
  }
  void close() override { opened = 0; }

  std::int64_t read(void*, std::byte* device, std::size_t nbytes, std::uint64_t offset) override {
    std::uint64_t fault;
    {
      const std::lock_guard lock(mutex_);
      fault = random_.below(8) < faults_ ? 1 + random_.below(4) : 0;
    }
    if (fault == 1) return -EIO;
    if (fault == 2) nbytes /= 2;
    if (fault == 3) std::this_thread::sleep_for(std::chrono::duration<double>(3 * kLateSeconds));
    const ssize_t moved = pread(descriptor_, device, nbytes, static_cast<off_t>(offset));
    if (fault == 4) device[nbytes / 3] ^= std::byte{16};
    return moved;
  }

  std::atomic<int> opened{0};

 private:
  std::mutex mutex_;
  Random random_;
  const std::uint64_t faults_;
  int descriptor_ = -1;
};

// Reads into memory of the host's, late or at once.
class SlowRoad final : public Road {
 public:
  explicit SlowRoad(bool is_late) : is_late_(is_late) {}
  const char* name() const override { return "slow"; }
  void* open(const File& file, std::string*) override {
    descriptor_ = file.descriptor;
    return this;
  }
  std::int64_t read(void*, std::byte* device, std::size_t nbytes, std::uint64_t offset) override {
    if (is_late_) std::this_thread::sleep_for(std::chrono::duration<double>(2 * kLateSeconds));
    return pread(descriptor_, device, nbytes, static_cast<off_t>(offset));
  }

 private:
  const bool is_late_;
  int descriptor_ = -1;
};

int host_checksums(const void* data, std::size_t nbytes, std::uint32_t* sums) {
  crc32c_blocks(data, nbytes, sums);
  return 0;
}
constexpr DeviceCalls kHost{nullptr, &host_checksums};

TEST(direct, pieces_join_to_the_checksum_of_the_whole) {
  // Bytes cut at random places: the registers of the pieces, moved by what is behind them and added
  // up, are that of the whole.
  Random random(3);
  Memory memory(kChecksumNbytes, random);
  for (int round = 0; round < 20; ++round) {
    std::uint32_t sum = 0;
    for (std::size_t at = 0; at < kChecksumNbytes;) {
      const std::size_t piece = 1 + random.below(kChecksumNbytes - at);
      // crc32c's own inversions taken off: the register from 0, or from ~0 for the first.
      const std::uint32_t value =
          ~crc32c(memory.span.data + at, piece, at == 0 ? 0 : ~std::uint32_t{0});
      sum ^= pieces::moved(value, kChecksumNbytes - at - piece);
      at += piece;
    }
    CHECK(~sum == crc32c(memory.span.data, kChecksumNbytes));
    CHECK(~(sum ^ 1) != crc32c(memory.span.data, kChecksumNbytes));
  }
}

TEST_OF_BACKENDS(direct, reads_are_whole_whatever_the_road_does) {
  // Three threads read random parts of an extent by a road that fails every other time, is late, or
  // brings other bytes; some are taken back. Every landing that ends well has its bytes in the
  // place that it names; the memory of each is its own until all is over.
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    Random random(seed);
    const auto disk = std::make_unique<Disk>(kind);
    auto extent = std::make_shared<Extent>(Extent::in_file(disk->file, 0, 32 * kChecksumNbytes));
    const auto source = std::make_shared<Memory>(32 * kChecksumNbytes, random);
    wait(extent->write(*disk->engine, 0, source->span, source));
    const auto road = std::make_shared<FaultyRoad>(seed, seed == 0 ? 0 : 4);
    DirectOptions options;
    options.late_seconds = seed == 0 ? 3600 : kLateSeconds;  // a busy machine is late by itself
    options.threads = 2;
    const auto reader = std::make_unique<DirectReader>(disk->engine, road, kHost, options);
    std::atomic<int> on_device{0}, cancelled{0};
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 3; ++t)
      threads.emplace_back([&, t] {
        Random mine(100 * seed + t);
        for (int i = 0; i < 25; ++i) {
          const auto host = std::make_shared<Memory>(kPlace),
                     device = std::make_shared<Memory>(kPlace);
          const auto memory =
              std::make_shared<std::pair<std::shared_ptr<Memory>, std::shared_ptr<Memory>>>(host,
                                                                                            device);
          const std::size_t at = mine.below(31) * kChecksumNbytes;
          const auto before = mine.below(4) == 0 ? std::make_shared<Ticket>(1) : nullptr;
          const LandingPtr landing =
              reader->read(extent, at, host->span, device->span.data, before, memory);
          const bool takes_back = mine.below(6) == 0;
          if (takes_back) reader->cancel(landing);
          if (before) before->part_done();
          try {
            wait(landing->ticket());
            CHECK(same((landing->on_device() ? device : host)->span, source->part(at, kPlace)),
                  "at ", at);
            on_device += landing->on_device();
          } catch (const StorageError& error) {
            CHECK(takes_back && error.error_number == ECANCELED, error.what());
            ++cancelled;
          }
        }
      });
    for (std::thread& thread : threads) thread.join();
    std::uint64_t refused = 0;
    for (const auto& [word, refusals] : reader->refused()) refused += refusals.count;
    CHECK(on_device + cancelled + static_cast<int>(refused) >= 75);
    if (seed == 0) CHECK(refused == 0 && on_device + cancelled == 75, refused);
    reader->shut_down();
    for (int i = 0; i < 3000 && reader->stuck(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(reader->stuck() == 0 && road->opened <= 1);
  }
}

TEST(direct, a_write_under_way_comes_first) {
  // The read is asked for while the write that it must see is held back.
  const FaultPlan slow = [] {
    FaultPlan plan = fault_plan(1);
    plan.delay = 1;
    plan.delay_seconds = 0.05;
    return plan;
  }();
  const Disk disk("threads", &slow);
  Random random(5);
  auto extent = std::make_shared<Extent>(Extent::in_file(disk.file, 0, kPlace));
  const auto source = std::make_shared<Memory>(kPlace, random);
  Memory host(kPlace), device(kPlace);
  const auto road = std::make_shared<FaultyRoad>(0, 0);
  DirectReader reader(disk.engine, road, kHost, {});
  const TicketPtr written = extent->write(*disk.engine, 0, source->span, source);
  const LandingPtr landing = reader.read(extent, 0, host.span, device.span.data, nullptr, nullptr);
  CHECK(!landing->ticket()->done());
  wait(landing->ticket());
  CHECK(written->done() && landing->on_device() && same(device.span, source->span));
}

TEST_OF_BACKENDS(direct, an_engine_ends_while_a_callback_keeps_the_state) {
  // The ticket before the landing ends on a thread of the engine, which is held back there, with
  // the landing's callback, until the landing is over and the reader and the engine are let go.
  auto disk = std::make_unique<Disk>(kind);
  auto extent = std::make_shared<Extent>(Extent::in_file(disk->file, 0, 2 * kPlace));
  const auto source = std::make_shared<Memory>(2 * kPlace);
  wait(extent->write(*disk->engine, 0, source->span, source));
  Memory other(kPlace), host(kPlace), device(kPlace);
  auto reader = std::make_unique<DirectReader>(disk->engine, std::make_shared<FaultyRoad>(0, 0),
                                               kHost, DirectOptions{});
  const auto held = std::make_shared<Ticket>(1);
  const TicketPtr before = disk->engine->submit({{Op::kRead, disk->file, 0, other.span}}, held);
  const LandingPtr landing =
      reader->read(extent, kPlace, host.span, device.span.data, before, nullptr);
  before->on_done(
      [](std::exception_ptr) { std::this_thread::sleep_for(std::chrono::milliseconds(300)); });
  held->part_done();
  wait(landing->ticket());
  reader.reset();
  disk.reset();
}

TEST_OF_BACKENDS(direct, memory_that_runs_out_leaves_every_landing_whole_or_failed) {
  // A read meets a shortage at each allocation, its caller's and those of the reader's threads; by
  // a road that answers, and by one that is late. It has ended, with its bytes or with the error;
  // the same reader goes on, and ends.
  Random random(140);
  for (bool is_late : {false, true}) {
    const auto disk = std::make_unique<Disk>(kind);
    auto extent = std::make_shared<Extent>(Extent::in_file(disk->file, 0, kPlace));
    const auto source = std::make_shared<Memory>(kPlace, random);
    wait(extent->write(*disk->engine, 0, source->span, source));
    DirectOptions options;
    options.late_seconds = is_late ? kLateSeconds : 3600;
    options.threads = 2;
    const auto made = [&] {
      return std::make_unique<DirectReader>(disk->engine, std::make_shared<SlowRoad>(is_late),
                                            kHost, options);
    };
    each_shortage([&](Shortage& shortage) { shortage.survived([&] { made(); }); });
    auto reader = made();
    each_shortage(
        [&](Shortage& shortage) {
          if (is_late) reader = made();  // a road that was late is not used again
          const auto host = std::make_shared<Memory>(kPlace),
                     device = std::make_shared<Memory>(kPlace);
          const auto memory =
              std::make_shared<std::pair<decltype(host), decltype(device)>>(host, device);
          LandingPtr landing;
          const auto read = [&] {
            landing = reader->read(extent, 0, host->span, device->span.data, nullptr, memory);
            wait(landing->ticket());
          };
          const bool is_done = shortage.survived(read);
          CHECK(!landing || landing->ticket()->done(), "allocation ", shortage.first());
          if (!is_done) read();
          CHECK(same((landing->on_device() ? device : host)->span, source->span), "allocation ",
                shortage.first());
        },
        is_late ? 5 : 1);
    for (int i = 0; i < 3000 && reader->stuck(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    reader->shut_down();
  }
}

}  // namespace
}  // namespace infinity::tests
