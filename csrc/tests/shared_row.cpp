// Shared rows: the ranks' parts come together whatever the order they come in, nothing is given
// back before all have read it, and who does not come is told.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "io/shared_row.h"
#include "tests/random.h"
#include "tests/test.h"

namespace infinity::tests {
namespace {

constexpr double kPatience = 60;

// Skips where the system lets no process map another's memory: there weights are sent.
void needs_shared_memory() {
  try {
    SharedRow first(1), second(1);
    first.connect({first.self(), second.self()}, 0);
  } catch (const StorageError& error) {
    throw Skipped(error.what());
  }
}

// The ranks of a row in one process: each maps the others' memory at other addresses than they do.
struct Row {
  std::vector<std::unique_ptr<SharedRow>> ranks;
  std::vector<std::vector<std::shared_ptr<Region>>> homes;  // [rank][array]

  Row(std::size_t count, const std::vector<std::size_t>& sizes, int threads = 1) : homes(count) {
    for (std::size_t rank = 0; rank < count; ++rank) {
      ranks.push_back(std::make_unique<SharedRow>(threads));
      for (std::size_t nbytes : sizes)
        homes[rank].push_back(ranks.back()->allocate(nbytes, true, 1));
    }
    connect();
  }

  void connect() {
    std::vector<SharedRow::Peer> peers;
    for (const auto& rank : ranks) peers.push_back(rank->self());
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank]->connect(peers, rank);
  }

  TicketPtr gather(std::size_t rank, std::size_t array, std::size_t nbytes,
                   std::vector<std::byte>& whole, double patience = kPatience,
                   std::uint64_t what = 7) {
    return ranks[rank]->gather(what + array, homes[rank][array]->data(), nbytes, whole.data(),
                               patience);
  }
};

std::byte byte_of(std::size_t rank, std::size_t array, std::size_t at, int round) {
  return static_cast<std::byte>(at * 31 + rank * 7 + array * 3 + static_cast<std::size_t>(round));
}

// Waits, and returns what went wrong.
std::string failure_of(const TicketPtr& ticket) {
  return said_by<std::runtime_error>([&] { ticket->wait(); });
}

TEST(shared_row, everyone_has_everyones_part) {
  // Rows of two and five ranks, arrays below a page and above a huge page; rounds whose values
  // differ, the ranks starting in any order.
  needs_shared_memory();
  Random random(3);
  for (std::size_t count : {2, 5})
    for (int threads : {1, 3}) {
      const std::vector<std::size_t> sizes = {100, 4096, 2 * 1024 * 1024 + 12};
      Row row(count, sizes, threads);
      for (int round = 0; round < 3; ++round) {
        std::vector<std::vector<std::byte>> expected;  // of each array
        for (std::size_t nbytes : sizes) expected.push_back(random.bytes(count * nbytes));
        for (std::size_t rank = 0; rank < count; ++rank)
          for (std::size_t array = 0; array < sizes.size(); ++array)
            std::copy_n(&expected[array][rank * sizes[array]], sizes[array],
                        row.homes[rank][array]->data());
        std::vector<std::vector<std::vector<std::byte>>> wholes(count);
        std::vector<TicketPtr> tickets;
        std::vector<std::size_t> order(count);
        std::iota(order.begin(), order.end(), 0);
        random.shuffle(order);
        for (std::size_t rank : order)
          for (std::size_t array = 0; array < sizes.size(); ++array) {
            wholes[rank].emplace_back(count * sizes[array], std::byte{0});
            std::copy_n(row.homes[rank][array]->data(), sizes[array],
                        wholes[rank].back().begin() + rank * sizes[array]);
            tickets.push_back(row.gather(rank, array, sizes[array], wholes[rank].back()));
          }
        for (const TicketPtr& ticket : tickets) ticket->wait();
        for (const auto& whole : wholes)
          for (std::size_t array = 0; array < sizes.size(); ++array)
            CHECK(std::memcmp(whole[array].data(), expected[array].data(),
                              expected[array].size()) == 0,
                  "array ", array);
      }
    }
}

TEST(shared_row, no_part_is_given_back_before_all_have_read_it) {
  // One of three ranks comes last: the others' gathers are not over, however long they wait, and
  // all end with its coming.
  needs_shared_memory();
  Row row(3, {4096});
  std::vector<std::vector<std::byte>> wholes(3, std::vector<std::byte>(3 * 4096));
  std::vector<TicketPtr> tickets = {row.gather(0, 0, 4096, wholes[0]),
                                    row.gather(1, 0, 4096, wholes[1])};
  CHECK(!tickets[0]->wait_for(0.3) && !tickets[1]->wait_for(0.1));
  tickets.push_back(row.gather(2, 0, 4096, wholes[2]));
  for (const TicketPtr& ticket : tickets) ticket->wait();
}

TEST(shared_row, places_to_post_are_used_again) {
  // More gathers than there are places to post: each place is used many times, and the values stay
  // the round's.
  needs_shared_memory();
  Row row(2, {64});
  std::vector<std::vector<std::byte>> wholes(2, std::vector<std::byte>(128));
  for (int round = 0; round < 3000; ++round) {
    for (std::size_t rank = 0; rank < 2; ++rank)
      row.homes[rank][0]->data()[5] = byte_of(rank, 0, 5, round);
    const TicketPtr first = row.gather(0, 0, 64, wholes[0]),
                    second = row.gather(1, 0, 64, wholes[1]);
    first->wait();
    second->wait();
    CHECK(wholes[0][64 + 5] == byte_of(1, 0, 5, round) && wholes[1][5] == byte_of(0, 0, 5, round),
          "round ", round);
  }
}

TEST(shared_row, another_gather_is_an_error_and_never_its_bytes) {
  // One rank gathers another array, or another number of bytes: both are told, and nothing was
  // copied.
  needs_shared_memory();
  for (int kind : {0, 1}) {
    Row row(2, {64, 64});
    std::vector<std::vector<std::byte>> wholes(2, std::vector<std::byte>(128));
    row.homes[1][0]->data()[0] = row.homes[1][1]->data()[0] = std::byte{9};
    const TicketPtr first = row.gather(0, 0, 64, wholes[0], 0.5);
    const TicketPtr second =
        kind == 0 ? row.gather(1, 1, 64, wholes[1], 0.5) : row.gather(1, 0, 32, wholes[1], 0.5);
    CHECK(failure_of(first).find("another gather") != std::string::npos &&
          wholes[0][64] == std::byte{0});
    failure_of(second);
    CHECK(failure_of(row.gather(0, 0, 64, wholes[0])).find("failed before") != std::string::npos);
  }
}

TEST(shared_row, who_only_completes_needs_no_home) {
  // A rank that has parted lets the other's gather end, with bytes of nobody; the next one is a
  // gather again. What is not over is known.
  needs_shared_memory();
  Row row(2, {64});
  std::vector<std::vector<std::byte>> wholes(2, std::vector<std::byte>(128));
  const TicketPtr real = row.gather(0, 0, 64, wholes[0]);
  CHECK(row.ranks[0]->begun() == 1 && row.ranks[0]->under_way() == std::vector<TicketPtr>{real} &&
        row.ranks[1]->under_way().empty());
  const TicketPtr stand_in =
      row.ranks[1]->gather(SharedRow::kNobodys, nullptr, 64, wholes[1].data(), kPatience);
  real->wait();
  stand_in->wait();
  row.homes[1][0]->data()[3] = std::byte{8};
  const TicketPtr first = row.gather(0, 0, 64, wholes[0]), second = row.gather(1, 0, 64, wholes[1]);
  first->wait();
  second->wait();
  CHECK(wholes[0][64 + 3] == std::byte{8} && row.ranks[0]->begun() == 2 &&
        row.ranks[0]->under_way().empty());
}

TEST(shared_row, who_does_not_come_is_told) {
  // After the patience, which the twin that comes in time does not need.
  needs_shared_memory();
  Row row(2, {64});
  std::vector<std::vector<std::byte>> wholes(2, std::vector<std::byte>(128));
  const std::string said = failure_of(row.gather(0, 0, 64, wholes[0], 0.2));
  CHECK(said.find("timed out") != std::string::npos &&
            said.find(std::to_string(getpid())) != std::string::npos,
        said);
}

TEST(shared_row, a_process_that_has_ended_is_told_at_once) {
  // The other rank is a child, which names its memory and ends when it is told to: long before the
  // patience is over.
  needs_shared_memory();
  int named[2], told[2];
  CHECK(pipe(named) == 0 && pipe(told) == 0);
  const pid_t child = fork();
  if (child == 0) {
    SharedRow theirs(1);
    const SharedRow::Peer peer = theirs.self();
    char byte;
    const bool said =
        write(named[1], &peer, sizeof peer) == sizeof peer && read(told[0], &byte, 1) == 1;
    _exit(said ? 0 : 1);
  }
  SharedRow mine(1);
  const auto home = mine.allocate(64, false, 1);
  SharedRow::Peer peer;
  CHECK(read(named[0], &peer, sizeof peer) == sizeof peer && peer.process == child);
  mine.connect({mine.self(), peer}, 0);
  std::vector<std::byte> whole(128);
  const TicketPtr ticket = mine.gather(1, home->data(), 64, whole.data(), 1e6);
  CHECK(!ticket->wait_for(0.2));
  CHECK(write(told[1], "x", 1) == 1);
  const std::string said = failure_of(ticket);
  CHECK(said.find("has ended") != std::string::npos &&
            said.find(std::to_string(child)) != std::string::npos,
        said);
  CHECK(waitpid(child, nullptr, 0) == child);
  for (int end : {named[0], named[1], told[0], told[1]}) ::close(end);
}

TEST(shared_row, what_was_named_has_to_be_there) {
  // A token of another row, a file that is none, a process that is none: nothing is connected.
  needs_shared_memory();
  Row row(2, {64});
  SharedRow other(1);
  const SharedRow::Peer theirs = row.ranks[0]->self();
  for (int kind : {0, 1, 2}) {
    SharedRow::Peer wrong = theirs;
    if (kind == 0) wrong.token ^= 1;
    if (kind == 1) wrong.file = 1 << 20;
    if (kind == 2) wrong.process = (1 << 22) + 1;  // above what a kernel numbers
    said_by<StorageError>([&] { other.connect({other.self(), wrong}, 0); });
  }
  said_by<UsageError>([&] { other.connect({theirs, other.self()}, 0); });
  other.connect({other.self(), theirs}, 0);
}

TEST(shared_row, memory_of_others_cannot_be_gathered_from_here) {
  // Only what was allocated in the row is shared, and only once the ranks know of each other.
  needs_shared_memory();
  Row row(2, {64});
  SharedRow alone(1);
  const auto home = alone.allocate(64, false, 1);
  const Region elsewhere(64, false, 1);
  std::vector<std::byte> whole(128);
  CHECK(alone.owns(*home) && !alone.shares(*home) && !row.ranks[0]->owns(elsewhere) &&
        row.ranks[0]->shares(*row.homes[0][0]));
  said_by<UsageError>([&] { alone.gather(1, home->data(), 64, whole.data(), 1); });
  said_by<UsageError>([&] { row.ranks[0]->gather(1, elsewhere.data(), 64, whole.data(), 1); });
  said_by<UsageError>([&] { row.ranks[0]->gather(1, nullptr, 64, whole.data(), 1); });
  const std::byte* gone = row.homes[0][0]->data();
  row.homes[0][0].reset();  // another region may have that address by now
  said_by<UsageError>([&] { row.ranks[0]->gather(1, gone, 64, whole.data(), 1); });
  said_by<UsageError>([&] { row.ranks[0]->allocate(64, false, 1); });
}

TEST(shared_row, closing_ends_who_waits) {
  // Another thread closes the row under a gather that would wait for ever; later gathers are
  // refused.
  needs_shared_memory();
  Row row(2, {64});
  std::vector<std::byte> whole(128);
  const TicketPtr ticket = row.gather(0, 0, 64, whole, 1e6);
  std::thread closer([&] { row.ranks[0]->close(); });
  CHECK(failure_of(ticket).find("closed") != std::string::npos);
  closer.join();
  row.ranks[0]->close();
  said_by<UsageError>([&] { row.gather(0, 0, 64, whole); });
}

TEST(shared_row, pages_that_become_huge_keep_what_is_there) {
  // Some bytes are written first, some by another thread while the pages are made present; the
  // other rank has all of them, and zeros between.
  needs_shared_memory();
  constexpr std::size_t kNbytes = 9 * 1024 * 1024 + 1;
  for (int threads : {1, 3}) {
    SharedRow first(1), second(1);
    const auto home = first.allocate(kNbytes, true, 0), other = second.allocate(kNbytes, true, 0);
    home->data()[0] = home->data()[5 * 1024 * 1024] = std::byte{7};
    std::thread writer([&] {
      for (std::size_t at = 1; at < kNbytes; at += kBlockNbytes) home->data()[at] = std::byte{9};
    });
    home->populate(threads);
    writer.join();
    first.connect({first.self(), second.self()}, 0);
    second.connect({first.self(), second.self()}, 1);
    std::vector<std::byte> mine(2 * kNbytes), theirs(2 * kNbytes), expected(kNbytes);
    const TicketPtr one = first.gather(1, home->data(), kNbytes, mine.data(), kPatience);
    const TicketPtr two = second.gather(1, other->data(), kNbytes, theirs.data(), kPatience);
    one->wait();
    two->wait();
    for (std::size_t at = 1; at < kNbytes; at += kBlockNbytes) expected[at] = std::byte{9};
    expected[0] = expected[5 * 1024 * 1024] = std::byte{7};
    CHECK(std::memcmp(theirs.data(), expected.data(), kNbytes) == 0);
  }
}

TEST(shared_row, memory_given_back_reads_as_zeros_everywhere) {
  // A region of the file is discarded: the others, who map the same pages, gather zeros, and what
  // is written later.
  needs_shared_memory();
  Row row(2, {4096});
  std::vector<std::vector<std::byte>> wholes(2, std::vector<std::byte>(2 * 4096));
  for (std::byte value : {std::byte{5}, std::byte{6}}) {
    std::fill_n(row.homes[1][0]->data(), 4096, value);
    for (bool discarded : {false, true}) {
      if (discarded) row.homes[1][0]->discard();
      const TicketPtr first = row.gather(0, 0, 4096, wholes[0]),
                      second = row.gather(1, 0, 4096, wholes[1]);
      first->wait();
      second->wait();
      CHECK(wholes[0][4096 + 17] == (discarded ? std::byte{0} : value));
    }
  }
}

}  // namespace
}  // namespace infinity::tests
