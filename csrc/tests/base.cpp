// What everything stands on: checksums, thread pools, rounding, alignment, checks.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/rounding.h"
#include "base/span.h"
#include "base/thread_pool.h"
#include "base/work_queue.h"
#include "tests/random.h"
#include "tests/scarce.h"
#include "tests/test.h"

namespace portable {  // portable_crc32c.cpp
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t seed);
std::uint32_t crc32c_before(std::uint32_t sum, std::size_t nbytes);
void crc32c_blocks(const void* data, std::size_t nbytes, std::uint32_t* sums);
}  // namespace portable

namespace infinity::tests {
namespace {

// The definition: the remainder of a polynomial division, bit by bit.
std::uint32_t crc32c_by_bits(const std::byte* data, std::size_t nbytes) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (std::size_t i = 0; i < nbytes; ++i) {
    crc ^= static_cast<std::uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78 : 0);
  }
  return ~crc;
}

std::vector<std::byte> random_bytes(std::size_t nbytes, std::uint64_t seed) {
  std::vector<std::byte> bytes(nbytes);
  Random(seed).fill({bytes.data(), nbytes});
  return bytes;
}

// How often each element of [begin, end) was visited, and how many calls there were.
struct Visits {
  Visits(int threads, std::size_t begin, std::size_t end, std::size_t grain) : counts(end) {
    ThreadPool pool(threads);
    std::vector<std::atomic<int>> seen(end);
    std::atomic<int> started{0}, cut_badly{0};
    pool.for_range(begin, end, grain, [&](std::size_t from, std::size_t to) {
      ++started;
      if ((from - begin) % grain || (to != end && (to - begin) % grain)) ++cut_badly;
      for (std::size_t i = from; i < to; ++i) ++seen[i];
    });
    for (std::size_t i = 0; i < end; ++i) counts[i] = seen[i];
    calls = started;
    ragged = cut_badly;
  }
  std::vector<int> counts;
  int calls = 0, ragged = 0;
};

TEST(base, crc32c_gives_the_published_values) {
  // RFC 3720, B.4, and the check value of the catalogue of CRCs; both ways to compute it.
  std::vector<unsigned char> zeros(32, 0), ones(32, 0xFF), up(32), down(32);
  std::iota(up.begin(), up.end(), 0);
  std::iota(down.rbegin(), down.rend(), 0);
  for (auto crc : {static_cast<std::uint32_t (*)(const void*, std::size_t, std::uint32_t)>(crc32c),
                   portable::crc32c}) {
    CHECK(crc("123456789", 9, 0) == 0xE3069283);
    CHECK(crc(zeros.data(), 32, 0) == 0x8A9136AA);
    CHECK(crc(ones.data(), 32, 0) == 0x62A8AB43);
    CHECK(crc(up.data(), 32, 0) == 0x46DD794E);
    CHECK(crc(down.data(), 32, 0) == 0x113FDB5C);
    CHECK(crc("", 0, 0) == 0);
  }
}

TEST(base, crc32c_is_the_division_by_its_polynomial) {
  // Every length to 100 from every alignment, against the bitwise definition.
  const auto bytes = random_bytes(108, 1);
  for (std::size_t shift = 0; shift < 8; ++shift)
    for (std::size_t nbytes = 0; nbytes <= 100; ++nbytes) {
      const std::uint32_t expected = crc32c_by_bits(bytes.data() + shift, nbytes);
      CHECK(crc32c(bytes.data() + shift, nbytes) == expected, nbytes, " bytes from ", shift);
      CHECK(portable::crc32c(bytes.data() + shift, nbytes, 0) == expected, nbytes, " bytes from ",
            shift);
    }
}

TEST(base, crc32c_in_two_parts_is_crc32c_of_the_whole) {
  // Cuts 200 bytes at every place and continues with the first part's value as seed.
  const auto bytes = random_bytes(200, 2);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    CHECK(crc32c(bytes.data() + cut, 200 - cut, crc32c(bytes.data(), cut)) == whole, "cut at ",
          cut);
    CHECK(portable::crc32c(bytes.data() + cut, 200 - cut, portable::crc32c(bytes.data(), cut, 0)) ==
          whole);
  }
}

TEST(base, crc32c_of_parts_in_any_order_joins_to_that_of_the_whole) {
  // Cuts several blocks at random into up to nine parts, empty ones too, and takes them up in a
  // random order. A part that is told a byte too few behind it gives another sum (the twin).
  Random random(5);
  const auto bytes = random_bytes(3 * kChecksumNbytes + 77, 5);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  CHECK(whole == portable::crc32c(bytes.data(), bytes.size(), 0));
  for (int round = 0; round < 40; ++round) {
    std::vector<std::size_t> cuts{0, bytes.size()};
    for (std::size_t i = random.below(9); i > 0; --i)
      cuts.push_back(random.below(bytes.size() + 1));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), std::size_t{0});
    random.shuffle(order);
    std::uint32_t joined = 0, wrong = 0;
    for (std::size_t i : order) {
      const std::uint32_t sum = crc32c(bytes.data() + cuts[i], cuts[i + 1] - cuts[i]);
      const std::size_t behind = bytes.size() - cuts[i + 1];
      joined ^= crc32c_before(sum, behind);
      wrong ^= crc32c_before(sum, behind ? behind - 1 : 0);
      CHECK(crc32c_before(sum, behind) == portable::crc32c_before(sum, behind));
    }
    CHECK(joined == whole, "round ", round);
    CHECK(order.size() == 1 || cuts[order.size() - 1] == 0 || wrong != whole, "round ", round);
  }
}

TEST(base, work_queue_does_every_job_once_before_it_stops) {
  // A thousand jobs from two threads, one to four of whose own do them; none runs in the thread
  // that brings it.
  for (int threads = 1; threads <= 4; ++threads) {
    std::vector<std::atomic<int>> done(1000);
    std::atomic<int> here{0};
    {
      WorkQueue queue(threads);
      const auto bring = [&](std::size_t first) {
        const auto me = std::this_thread::get_id();
        for (std::size_t i = first; i < done.size(); i += 2)
          queue.add([&, i, me] { ++done[i], here += std::this_thread::get_id() == me; },
                    i % 3 == 0);
      };
      std::thread other(bring, 1);
      bring(0);
      other.join();
    }
    for (std::size_t i = 0; i < done.size(); ++i)
      CHECK(done[i] == 1, "job ", i, " with ", threads, " threads");
    CHECK(here == 0);
  }
  said_by<UsageError>([] { WorkQueue queue(0); });
}

TEST(base, work_queue_asks_again_for_a_thread_that_was_refused) {
  // There is no memory for the first thread: the caller does that job, and a thread the next one.
  std::thread::id first, second;
  WorkQueue queue(1);
  Shortage shortage(0, true, false);
  CHECK(shortage.survived([&] { queue.add([&] { first = std::this_thread::get_id(); }, false); }));
  queue.add([&] { second = std::this_thread::get_id(); }, false);
  queue.stop();
  const auto me = std::this_thread::get_id();
  CHECK(shortage.ran_out() && first == me && second != me && second != std::thread::id());
}

TEST(base, work_queue_does_what_is_awaited_first) {
  // Holds the only thread, then brings jobs of both kinds in turns: the awaited ones come first,
  // each kind in its order.
  std::vector<int> order;
  std::mutex gate;
  gate.lock();
  {
    WorkQueue queue(1);
    queue.add([&] { std::lock_guard<std::mutex> wait(gate); }, true);
    for (int i = 0; i < 6; ++i) queue.add([&, i] { order.push_back(i); }, i % 2 == 1);
    gate.unlock();
  }
  CHECK(order == (std::vector<int>{1, 3, 5, 0, 2, 4}));
}

TEST(base, crc32c_of_blocks_is_crc32c_of_each) {
  // One to eight blocks, so that three at a time leave every rest, with whole and short last ones.
  const auto bytes = random_bytes(8 * kChecksumNbytes, 3);
  for (std::size_t count = 1; count <= 8; ++count)
    for (std::size_t missing :
         {std::size_t{0}, kBlockNbytes, std::size_t{1}, kChecksumNbytes - 1}) {
      const std::size_t nbytes = count * kChecksumNbytes - missing;
      CHECK(checksum_count(nbytes) == count);
      std::vector<std::uint32_t> sums(count + 1, 7), portable_sums(count + 1, 7);
      crc32c_blocks(bytes.data(), nbytes, sums.data());
      portable::crc32c_blocks(bytes.data(), nbytes, portable_sums.data());
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = i * kChecksumNbytes;
        CHECK(sums[i] == crc32c(bytes.data() + at, std::min(kChecksumNbytes, nbytes - at)),
              "block ", i);
      }
      CHECK(sums == portable_sums);
      CHECK(sums[count] == 7, "written behind the last checksum");
    }
}

TEST(base, crc32c_sees_every_single_flipped_bit) {
  // Flips each bit of 64 bytes, and single ones of a whole block, one at a time.
  auto bytes = random_bytes(kChecksumNbytes, 4);
  for (std::size_t nbytes : {std::size_t{64}, bytes.size()}) {
    const std::uint32_t before = crc32c(bytes.data(), nbytes);
    for (std::size_t bit = 0; bit < nbytes * 8; bit += nbytes == 64 ? 1 : 4099) {
      const auto mask = static_cast<std::byte>(1 << bit % 8);
      bytes[bit / 8] ^= mask;
      CHECK(crc32c(bytes.data(), nbytes) != before, "bit ", bit);
      bytes[bit / 8] ^= mask;
      CHECK(crc32c(bytes.data(), nbytes) == before);
    }
  }
}

TEST(base, thread_pool_runs_every_part_once) {
  // A thousand rounds of 1 to 5 threads; each part counts itself.
  for (int threads = 1; threads <= 5; ++threads) {
    ThreadPool pool(threads);
    CHECK(pool.thread_count() == threads);
    // not atomic: the end of `run` must order what the parts wrote
    std::vector<int> counts(threads);
    for (int round = 1; round <= 200; ++round) {
      pool.run([&](int part) { ++counts[part]; });
      for (int part = 0; part < threads; ++part) CHECK(counts[part] == round, "part ", part);
    }
  }
}

TEST(base, thread_pool_visits_every_element_once) {
  // Ranges that are empty, of one element, smaller than the grain, ragged, and not from zero.
  for (int threads : {1, 2, 3, 5})
    for (std::size_t begin : {0, 13})
      for (std::size_t count : {0, 1, 7, 8, 9, 64, 1000})
        for (std::size_t grain : {1, 8, 10'000}) {
          const Visits visits(threads, begin, begin + count, grain);
          for (std::size_t i = 0; i < begin + count; ++i)
            CHECK(visits.counts[i] == (i >= begin), i, " of ", count, " from ", begin, ", ",
                  threads, " threads");
          CHECK(visits.ragged == 0, "a cut is not at a multiple of ", grain);
          CHECK(visits.calls <= 8 * threads, "pieces are a few per thread");
          if (count && (count <= grain || threads == 1)) CHECK(visits.calls == 1);
        }
}

TEST(base, thread_pool_uses_all_its_threads) {
  // The twin: a pool of three that ran all on one thread would pass everything above.
  ThreadPool pool(3);
  std::vector<std::thread::id> ids(3);
  pool.run([&](int part) { ids[part] = std::this_thread::get_id(); });
  CHECK(ids[0] == std::this_thread::get_id());
  CHECK(ids[1] != ids[0] && ids[2] != ids[0] && ids[1] != ids[2]);
}

TEST(base, thread_pool_leaves_threads_out) {
  // A range with at most one, two and three of three threads: each element once, by no more threads
  // than that.
  ThreadPool pool(3);
  for (int most = 1; most <= 3; ++most) {
    std::mutex mutex;
    std::set<std::thread::id> seen;
    std::vector<int> counts(1000);
    pool.for_range(
        0, counts.size(), 1,
        [&](std::size_t begin, std::size_t end) {
          for (std::size_t i = begin; i < end; ++i) ++counts[i];
          std::lock_guard<std::mutex> lock(mutex);
          seen.insert(std::this_thread::get_id());
        },
        most);
    CHECK(static_cast<int>(seen.size()) <= most, seen.size(), " threads of at most ", most);
    CHECK(std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; }));
  }
}

TEST(base, thread_pool_without_threads_is_refused) {
  // Zero and fewer threads.
  for (int threads : {0, -3}) {
    const std::string said = said_by<UsageError>([&] { ThreadPool pool(threads); });
    CHECK(said.find(std::to_string(threads)) != std::string::npos, said);
  }
}

TEST(base, rounding_keeps_subnormals_whatever_the_maker_does) {
  // Flushes subnormals to zero on this thread, makes a pool, and halves the smallest normal number
  // on all threads.
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
  volatile float smallest = 0x1p-126f;
  CHECK(smallest * 0.5f == 0, "the twin: this thread flushes");
  std::vector<float> halves(3);
  ThreadPool pool(3);
  pool.run([&](int part) {
    if (part == 0) use_default_rounding();
    halves[part] = smallest * 0.5f;
  });
  _mm_setcsr(before);
  for (float half : halves) CHECK(half > 0);
#else
  throw Skipped("written for x86 registers");
#endif
}

TEST(base, span_rounding_meets_its_edges) {
  // Around zero and around multiples of a block.
  for (std::size_t blocks :
       {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{1} << 40}) {
    const std::size_t at = blocks * kBlockNbytes;
    CHECK(round_up(at, kBlockNbytes) == at && round_down(at, kBlockNbytes) == at);
    CHECK(round_up(at + 1, kBlockNbytes) == at + kBlockNbytes &&
          round_down(at + 1, kBlockNbytes) == at);
    CHECK(round_down(at + kBlockNbytes - 1, kBlockNbytes) == at);
  }
  alignas(64) std::byte bytes[65];
  CHECK(is_aligned(bytes, 64) && is_aligned(bytes + 64, 64));
  CHECK(!is_aligned(bytes + 1, 64) && !is_aligned(bytes + 32, 64));
}

TEST(base, checks_stay_on_and_say_their_numbers) {
  // A broken invariant, a refused argument, a refusal of the kernel; and none of them where all is
  // well.
  const int three = 3;
  const std::string check =
      said_by<CheckFailure>([&] { INFINITY_CHECK(three == 4, "three is ", three); });
  CHECK(check.find("three == 4") != std::string::npos &&
            check.find("three is 3") != std::string::npos,
        check);
  CHECK(said_by<UsageError>([&] { INFINITY_REQUIRE(three == 4, "not ", three); }) == "not 3");
  CHECK(StorageError(EIO, "/disk", "read").path == "/disk");
  CHECK(std::string(StorageError(EIO, "/disk", "read").what()) ==
        concat("read: ", std::strerror(EIO)));
  INFINITY_CHECK(three == 3, "unreachable");
  INFINITY_REQUIRE(three == 3, "unreachable");
}

}  // namespace
}  // namespace infinity::tests
