// Disk: an engine, one swap file of its own in the working folder, and aligned memory. Both
// backends are tested by the same cases: `TEST_OF_BACKENDS(io, name)` is "io/name/uring" and
// "io/name/threads".
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "io/engine.h"
#include "io/extent.h"
#include "memory/region.h"
#include "tests/doubles/doubles.h"
#include "tests/random.h"
#include "tests/test.h"

namespace infinity::tests {

using doubles::FaultPlan;

constexpr std::size_t kMib = 1024 * 1024;

inline void need(const std::string& kind) {
  std::string why;
  if (kind == "uring" && !make_uring_backend(4, why)) throw Skipped(why);
}

inline std::shared_ptr<const BackendLayer> layer_of(const FaultPlan& faults) {
  auto layer = std::make_shared<doubles::Doubles>();
  layer->faults = faults;
  return layer;
}

struct Disk {
  explicit Disk(const std::string& kind, const FaultPlan* faults = nullptr,
                std::size_t block_nbytes = 4 * kBlockNbytes, unsigned depth = 8,
                std::uint64_t nbytes = 4 * kMib)
      : path(concat("swap-", getpid(), "-", count()++)), nbytes(nbytes) {
    IoOptions options;
    options.kind = kind;
    options.depth = depth;
    options.block_nbytes = block_nbytes;
    options.threads = 3;
    options.work_threads = 3;
    if (faults) options.layer = layer_of(*faults);
    engine = std::make_shared<IoEngine>(options);
    file = engine->create_file(path, nbytes);
  }
  ~Disk() { unlink(path.c_str()); }

  TicketPtr write(std::uint64_t offset, Span span, const TicketPtr& after = nullptr) const {
    return engine->submit({{Op::kWrite, file, offset, span}}, after);
  }
  TicketPtr read(std::uint64_t offset, Span span, const TicketPtr& after = nullptr) const {
    return engine->submit({{Op::kRead, file, offset, span}}, after);
  }

  // What another process sees.
  std::string raw(std::uint64_t offset, std::size_t nbytes) const {
    std::string bytes(nbytes, '\0');
    std::ifstream stream(path, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    stream.read(bytes.data(), static_cast<std::streamsize>(nbytes));
    CHECK(stream, "cannot read ", path);
    return bytes;
  }

  // Another process flips one bit.
  void flip(std::uint64_t offset) const {
    const char byte = static_cast<char>(raw(offset, 1)[0] ^ 4);
    std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.write(&byte, 1);
    CHECK(stream.flush(), "cannot write ", path);
  }

  static int& count() {
    static int made = 0;
    return made;
  }

  const std::string path;
  const std::uint64_t nbytes;
  std::shared_ptr<IoEngine> engine;
  int file = -1;
};

// Page-aligned bytes of one test.
struct Memory {
  explicit Memory(std::size_t nbytes) : region(nbytes, false, 0), span{region.data(), nbytes} {}
  Memory(std::size_t nbytes, Random& random) : Memory(nbytes) { random.fill(span); }

  Span part(std::size_t at, std::size_t nbytes) const { return {span.data + at, nbytes}; }
  std::string bytes() const { return {reinterpret_cast<const char*>(span.data), span.nbytes}; }
  bool all_zero() const { return bytes() == std::string(span.nbytes, '\0'); }

  Region region;
  Span span;
};

inline bool same(Span left, Span right) {
  return left.nbytes == right.nbytes && std::memcmp(left.data, right.data, left.nbytes) == 0;
}

// Waits, and fails where a test would otherwise hang.
inline void wait(const TicketPtr& ticket) {
  CHECK(ticket->wait_for(60), "a ticket was not finished within a minute");
  ticket->wait();
}

// The error that `ticket` ends with.
template <class Error>
Error thrown_by(const TicketPtr& ticket) {
  try {
    wait(ticket);
  } catch (const Error& error) {
    return error;
  }
  throw Failed("nothing was thrown");
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Open descriptors and threads of this process; io_uring's workers belong to the kernel, which ends
// them later.
struct Resources {
  int descriptors = entries("/proc/self/fd", false);
  int threads = entries("/proc/self/task", true);

  // Fails when there are more than when this was made. A joined thread may stay listed for a
  // moment.
  void check_nothing_leaked() const {
    Resources now;
    for (int i = 0; i < 100 && (now.threads > threads || now.descriptors > descriptors); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      now = Resources();
    }
    CHECK(now.descriptors <= descriptors, descriptors, " descriptors became ", now.descriptors);
    CHECK(now.threads <= threads, threads, " threads became ", now.threads);
  }

  static int entries(const std::string& folder, bool tasks) {
    int found = 0;
    DIR* open = opendir(folder.c_str());
    while (const dirent* entry = readdir(open)) {
      std::string name;
      if (tasks) std::getline(std::ifstream(folder + "/" + entry->d_name + "/comm"), name);
      found += entry->d_name[0] != '.' && name.rfind("iou-", 0) != 0;
    }
    closedir(open);
    return found;
  }
};

inline FaultPlan fault_plan(std::uint64_t seed) {
  FaultPlan plan;
  plan.seed = seed;
  plan.delay_seconds = 0.0002;
  return plan;
}

// Runs a case on one backend and sees that nothing stays behind.
inline void run_on(const std::string& kind, void (*run)(const std::string&)) {
  need(kind);
  // with the first thread ThreadSanitizer starts one of its own, which stays
  std::thread([] {}).join();
  const Resources before;
  run(kind);
  before.check_nothing_leaked();
}

}  // namespace infinity::tests

#define TEST_OF_BACKENDS(group, name)                                       \
  static void group##_##name(const std::string& kind);                      \
  static const bool group##_##name##_known =                                \
      (::infinity::tests::cases().push_back(                                \
           {#group "/" #name "/uring",                                      \
            [] { ::infinity::tests::run_on("uring", group##_##name); }}),   \
       ::infinity::tests::cases().push_back(                                \
           {#group "/" #name "/threads",                                    \
            [] { ::infinity::tests::run_on("threads", group##_##name); }}), \
       true);                                                               \
  static void group##_##name(const std::string& kind)
