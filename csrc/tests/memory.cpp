// Regions and leases: aligned, zeroed, never handed out twice, given back once.
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "memory/account.h"
#include "memory/pool.h"
#include "memory/region.h"
#include "tests/random.h"
#include "tests/scarce.h"
#include "tests/test.h"

namespace infinity::tests {
namespace {

constexpr std::size_t kMib = 1024 * 1024;

std::shared_ptr<PinnedPool> pool_of(std::size_t blocks) {
  return std::make_shared<PinnedPool>(std::make_shared<Region>(blocks * kBlockNbytes, false, 0));
}

TEST(memory, region_is_aligned_zeroed_and_all_its_own) {
  // Sizes around pages and huge pages, touched by none, one and three threads; every page is
  // written and read.
  for (bool huge : {false, true})
    for (int threads : {0, 1, 3})
      for (std::size_t nbytes :
           {std::size_t{1}, kBlockNbytes, kBlockNbytes + 1, 2 * kMib - 1, 2 * kMib, 5 * kMib + 1}) {
        Region region(nbytes, huge, threads);
        CHECK(region.nbytes() == round_up(nbytes, kBlockNbytes), nbytes);
        CHECK(is_aligned(region.data(), kBlockNbytes));
        if (huge && region.nbytes() >= 2 * kMib) CHECK(is_aligned(region.data(), 2 * kMib));
        if (!huge) CHECK(!region.huge_pages());
        for (std::size_t at = 0; at < region.nbytes(); at += kBlockNbytes / 2) {
          CHECK(region.data()[at] == std::byte{0}, "byte ", at);
          region.data()[at] = std::byte{1};
        }
        region.data()[region.nbytes() - 1] = std::byte{1};
      }
}

TEST(memory, populating_keeps_what_is_there) {
  // Some bytes are written first, some by another thread meanwhile; every other byte is zero
  // afterwards.
  for (bool huge : {false, true})
    for (int threads : {1, 3}) {
      Region region(9 * kMib + 1, huge, 0);
      region.data()[0] = region.data()[5 * kMib] = std::byte{7};
      std::thread writer([&] {
        for (std::size_t at = 1; at < region.nbytes(); at += kBlockNbytes)
          region.data()[at] = std::byte{9};
      });
      region.populate(threads);
      writer.join();
      for (std::size_t at = 0; at < region.nbytes(); ++at) {
        const int expected = at == 0 || at == 5 * kMib ? 7 : at % kBlockNbytes == 1 ? 9 : 0;
        CHECK(region.data()[at] == std::byte(expected), "byte ", at);
      }
    }
}

TEST(memory, region_nobody_can_have_is_refused) {
  // No bytes at all, and more than the address space.
  said_by<UsageError>([] { Region region(0, false, 0); });
  for (bool huge : {false, true})
    said_by<StorageError>([&] { Region region(std::size_t{1} << 60, huge, 0); });
}

TEST(memory, leases_are_rounded_to_pages_and_do_not_overlap) {
  // Leases of many sizes until the pool is full; each is filled with its own number, then all are
  // read.
  Random random(11);
  auto pool = pool_of(64);
  std::vector<Lease> leases;
  std::size_t sum = 0;
  for (;;) {
    const std::size_t nbytes = 1 + random.below(5 * kBlockNbytes);
    Lease lease = pool->try_lease(nbytes);
    if (!lease) break;
    CHECK(lease.span().nbytes == round_up(nbytes, kBlockNbytes) &&
          is_aligned(lease.span().data, kBlockNbytes));
    CHECK(lease.span().data >= pool->region()->data());
    CHECK(lease.span().data + lease.span().nbytes <=
          pool->region()->data() + pool->capacity_nbytes());
    sum += lease.span().nbytes;
    leases.push_back(std::move(lease));
    CHECK(pool->leased_nbytes() == sum);
  }
  CHECK(leases.size() > 10);
  for (std::size_t i = 0; i < leases.size(); ++i)
    std::fill_n(leases[i].span().data, leases[i].span().nbytes, static_cast<std::byte>(i));
  for (std::size_t i = 0; i < leases.size(); ++i)
    for (std::size_t at = 0; at < leases[i].span().nbytes; ++at)
      CHECK(leases[i].span().data[at] == static_cast<std::byte>(i), "lease ", i);
}

TEST(memory, pool_that_is_full_says_no_until_something_is_given_back) {
  // Takes all four pages, fails, gives one back, succeeds; the twin is the lease that fails.
  auto pool = pool_of(4);
  std::vector<Lease> leases;
  for (int i = 0; i < 4; ++i) leases.push_back(pool->try_lease(1));
  CHECK(leases.back() && !pool->try_lease(1));
  leases[2].release();
  CHECK(!pool->try_lease(kBlockNbytes + 1), "two pages out of one");
  CHECK(pool->try_lease(kBlockNbytes));
  said_by<UsageError>([&] { pool->try_lease(0); });
  const std::string said = said_by<UsageError>([&] { pool->try_lease(4 * kBlockNbytes + 1); });
  CHECK(said.find(std::to_string(4 * kBlockNbytes)) != std::string::npos, said);
  said_by<UsageError>([&] { pool->try_lease(~std::size_t{0}); });
}

TEST(memory, neighbours_merge_whatever_the_order_they_are_given_back_in) {
  // Gives five leases back in each of 120 orders; then the whole pool can be leased in one piece.
  std::vector<int> order = {0, 1, 2, 3, 4};
  do {
    auto pool = pool_of(15);
    std::vector<Lease> leases;
    for (std::size_t i = 1; i <= 5; ++i) leases.push_back(pool->try_lease(i * kBlockNbytes));
    for (int i : order) {
      CHECK(!pool->try_lease(15 * kBlockNbytes));
      leases[i].release();
    }
    CHECK(pool->leased_nbytes() == 0 && pool->peak_nbytes() == 15 * kBlockNbytes);
    CHECK(pool->try_lease(15 * kBlockNbytes));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(memory, lease_that_moves_is_given_back_once) {
  // Moves a lease through a constructor, an assignment over another lease, itself and an optional.
  auto pool = pool_of(4);
  Lease first = pool->try_lease(kBlockNbytes), second = pool->try_lease(2 * kBlockNbytes);
  const Span kept = second.span();
  Lease third = std::move(first);
  CHECK(!first && third && pool->leased_nbytes() == 3 * kBlockNbytes);
  third = std::move(second);  // gives its own page back
  CHECK(!second && third.span().data == kept.data && pool->leased_nbytes() == 2 * kBlockNbytes);
  Lease& same = third;
  third = std::move(same);
  CHECK(third && pool->leased_nbytes() == 2 * kBlockNbytes);
  second.release();
  first.release();
  CHECK(pool->leased_nbytes() == 2 * kBlockNbytes, "an empty lease gave something back");
  {
    std::optional<Lease> inside(std::move(third));
    CHECK(pool->leased_nbytes() == 2 * kBlockNbytes);
  }
  CHECK(pool->leased_nbytes() == 0);
  third.release();
  CHECK(pool->leased_nbytes() == 0 && pool->try_lease(4 * kBlockNbytes));
}

TEST(memory, lease_keeps_its_memory_alive) {
  // Drops the pool while a lease is out, writes, and only then drops the lease.
  auto pool = pool_of(2);
  std::weak_ptr<Region> region = pool->region();
  Lease lease = pool->try_lease(kBlockNbytes);
  pool.reset();
  CHECK(!region.expired());
  std::fill_n(lease.span().data, lease.span().nbytes, std::byte{5});
  lease.release();
  CHECK(region.expired());
}

TEST(memory, lease_that_is_dropped_while_a_transfer_has_it_is_given_to_nobody) {
  // Drops the lease, then the transfer's hold; the twin is a lease without a transfer.
  auto pool = pool_of(2);
  Lease lease = pool->try_lease(2 * kBlockNbytes);
  std::shared_ptr<void> transfer = lease.hold();
  lease.release();
  CHECK(!lease.hold() && !pool->try_lease(kBlockNbytes),
        "memory that a transfer uses was given away");
  CHECK(pool->wait_for_transfer(0.001), "nobody knows of the transfer");
  std::thread ending([&] { transfer.reset(); });
  while (pool->wait_for_transfer(10)) {
  }
  CHECK(pool->try_lease(2 * kBlockNbytes), "the transfer is over");
  ending.join();
  pool->try_lease(kBlockNbytes);
  CHECK(pool->leased_nbytes() == 0 && !pool->wait_for_transfer(10));
}

TEST(memory, leases_that_were_taken_back_give_nothing_back) {
  // Takes all leases back, leases anew, then drops the old ones; while a transfer has one it is
  // refused.
  auto pool = pool_of(4);
  Lease old = pool->try_lease(3 * kBlockNbytes);
  {
    const std::shared_ptr<void> transfer = old.hold();
    said_by<CheckFailure>([&] { pool->take_back_all(); });
  }
  pool->take_back_all();
  Lease anew = pool->try_lease(4 * kBlockNbytes);
  CHECK(anew && pool->leased_nbytes() == 4 * kBlockNbytes);
  old.release();
  CHECK(pool->leased_nbytes() == 4 * kBlockNbytes && !pool->try_lease(1),
        "an old lease gave away what a new one has");
}

TEST(memory, charges_of_a_pass_are_forgotten_together) {
  // Charges for good and for a pass, forgets the pass, then drops its charges late.
  auto account = std::make_shared<Account>();
  account->budget = 10;
  auto home = account->charge(4, false), passing = account->charge(5, true);
  CHECK(!account->charge(2, false) && account->charged() == 9 && account->peak() == 9);
  account->forget_passing();
  CHECK(account->charged() == 4);
  auto next = account->charge(6, true);
  CHECK(next && account->charged() == 10);
  passing.reset();
  CHECK(account->charged() == 10, "a charge that was forgotten was given back");
  home->release();
  home->release();
  next.reset();
  CHECK(account->charged() == 0 && account->peak() == 10);
}

TEST(memory, pages_are_there_when_they_were_waited_for_and_stopping_ends_it) {
  // Has three regions made present behind; then drops a maker that has only begun.
  std::vector<std::shared_ptr<Region>> regions;
  for (int i = 0; i < 3; ++i) regions.push_back(std::make_shared<Region>(8 * kMib, i % 2 == 0, 0));
  Pages pages(regions, 2);
  pages.wait();
  pages.wait();
  CHECK(pages.done());
  for (int i = 0; i < 20; ++i) Pages dropped({std::make_shared<Region>(64 * kMib, false, 0)}, 2);
}

TEST(memory, leases_of_several_threads_never_overlap) {
  // Four threads lease, mark, check and release; what one marked no other may change.
  auto pool = pool_of(12);
  std::atomic<int> wrong{0}, refused{0}, served{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= 4; ++id)
    threads.emplace_back([&, id] {
      Random random(20 + id);
      for (int round = 0; round < 500; ++round) {
        Lease lease = pool->try_lease(1 + random.below(4 * kBlockNbytes));
        if (!lease) {
          ++refused;
          continue;
        }
        ++served;
        const Span span = lease.span();
        std::fill_n(span.data, span.nbytes, static_cast<std::byte>(id));
        if (round % 8 == 0) std::this_thread::yield();
        wrong +=
            static_cast<int>(std::count_if(span.data, span.data + span.nbytes, [&](std::byte each) {
              return each != static_cast<std::byte>(id);
            }));
        Lease moved = std::move(lease);
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0, wrong.load(), " bytes changed under a lease");
  CHECK(served > 0 && pool->leased_nbytes() == 0 && pool->try_lease(12 * kBlockNbytes));
}

TEST(memory, memory_that_runs_out_loses_no_lease) {
  // A lease is taken, held by a transfer and given back with each allocation failing in its turn;
  // then all of the pool can be leased again, in one piece.
  const auto pool = pool_of(8);
  each_shortage([&](Shortage& shortage) {
    const Lease first = pool->try_lease(kBlockNbytes);
    shortage.survived([&] {
      Lease lease = pool->try_lease(2 * kBlockNbytes), other = pool->try_lease(kBlockNbytes);
      const std::shared_ptr<void> transfer = lease.hold();
      lease.release();
      other.release();
    });
    CHECK(pool->leased_nbytes() == kBlockNbytes, "allocation ", shortage.first());
    CHECK(!pool->wait_for_transfer(0));
    CHECK(pool->try_lease(7 * kBlockNbytes), "allocation ", shortage.first());
    if (shortage.survived([&] { pool->take_back_all(); })) CHECK(pool->leased_nbytes() == 0);
    pool->take_back_all();
    CHECK(pool->try_lease(8 * kBlockNbytes), "allocation ", shortage.first());
  });
}

}  // namespace
}  // namespace infinity::tests
