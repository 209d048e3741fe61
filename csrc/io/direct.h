// DirectReader: reads parts of extents into a device's memory without a copy in host memory, if a
// road exists.
//
//   road      moves bytes from a file into the device's memory, on a thread that blocks: cuFile
//   bounce    the I/O engine's way: into pinned host memory, from which the device copies them.
//             Every read that no road can do goes by bounce
//   landing   one read. It ends whole and verified in one of its two places, the device's or the
//             host's, or with an error; never half in each
//   refusal   why a landing went by bounce: "short", "late", "refused", "misaligned", "unwritten"
//             (a block is to be zeros: perhaps nothing was written since the space was reserved),
//             "changed" (the checksums differ; the bounce verifies the bytes again) or "closed"
//   closed    a road to a file that was late once, brought other bytes once, or failed
//             kMostFailures times in a row. It is not used again
//   turn      which part of a piece this read copies out and verifies, if the host samples because
//             the device computes no checksums. After `sampled` reads of the piece every part had
//             its turn
//   stuck     a read by the road that was given up as late. It may still write to its place on the
//             device, so its memory is kept until it returns
//
// Everything runs on the reader's own threads, the checksums too: a landing that has ended is
// verified.
//
// Thread safety: every member function of DirectReader may be called from any thread, the
// destructor only while no other thread uses the reader. `Landing::on_device` is valid after its
// ticket has finished.
// `State::mutex` guards the members marked so, and the landings' stage, time, memory and bounce.
// `State::opening` is held while a file is opened by the road.
// Lock order: Ticket -> DirectReader -> IoEngine; `opening` before `mutex`.
// Ownership: the reader keeps the engine. It shares the State, which keeps the road, with its
// threads and with callbacks on the engine's threads. The State may outlive the reader and the
// engine. It must not keep the engine: an engine cannot be destroyed on its own thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "io/device_calls.h"
#include "io/engine.h"
#include "io/extent.h"

namespace infinity {

class Road {
 public:
  static constexpr std::int64_t kRoadError = 5000;

  virtual ~Road() = default;
  virtual const char* name() const = 0;

  // Opens the road to a file. Returns null, and the reason, if it refuses. One thread at a time.
  virtual void* open(const File& file, std::string* refusal) = 0;
  // Returns the bytes that were read, or -errno, or an error of the road's own below -kRoadError.
  // Blocks until the device's memory has the bytes. Thread-safe.
  virtual std::int64_t read(void* handle, std::byte* device, std::size_t nbytes,
                            std::uint64_t offset) = 0;
  // Releases the files and the device's memory, which have to be valid still. Last use; idempotent.
  virtual void close() {}
};

class Landing {
 public:
  TicketPtr ticket() const { return ticket_; }
  // True if the bytes are on the device. Valid once the ticket has finished without an error.
  bool on_device() const { return on_device_; }

 private:
  friend class DirectReader;
  enum class Stage { kBefore, kWaiting, kRunning, kBounced, kOver };

  std::shared_ptr<const Extent> extent_;
  std::size_t at_ = 0;
  Span host_;
  std::byte* device_ = nullptr;
  std::vector<Request> requests_;
  Sums wrote_;  // the checksums that its bytes have to have
  std::shared_ptr<void> memory_;
  TicketPtr ticket_, bounced_;
  Stage stage_ = Stage::kBefore;
  std::chrono::steady_clock::time_point since_;  // when its stage began
  bool on_device_ = false;
};
using LandingPtr = std::shared_ptr<Landing>;

struct DirectOptions {
  int threads = 8;  // concurrent reads by the road
  double late_seconds = 10;  // after which a read is given up
  double hung_seconds = 120;  // after which a stuck read counts as hung
  int device = 0;  // that the threads enter
  bool checksums = true;  // verify reads
  // If the device computes no checksums: every byte is verified once in so many reads. 0: the
  // device has to.
  int sampled = 0;
};

struct Refusals {
  std::uint64_t count = 0;
  std::string first;  // the first one: the read, and the reason
};

class DirectReader {
 public:
  static constexpr int kMostFailures = 8;

  // `road`: null if there is none. Throws StorageError if the system refuses a thread.
  DirectReader(std::shared_ptr<IoEngine> engine, std::shared_ptr<Road> road, DeviceCalls calls,
               const DirectOptions& options);
  ~DirectReader();
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;

  // Reads `host.nbytes` of `extent` from byte `at`, after the writes under way there, and `after`,
  // have finished without error. `host` and `device` belong to the landing until it ends; `memory`
  // keeps them valid. The extent must not be written meanwhile.
  LandingPtr read(const std::shared_ptr<const Extent>& extent, std::size_t at, Span host,
                  std::byte* device, const TicketPtr& after, const std::shared_ptr<void>& memory);

  // Cancels a landing that has not started: it fails with ECANCELED. A started one finishes.
  void cancel(const LandingPtr& landing);

  // Waits for all landings, and ends the threads, except those of stuck reads. Idempotent.
  void shut_down();

  bool is_ours() const { return getpid() == process_; }
  std::uint64_t nbytes() const;  // read by the road
  std::map<std::string, Refusals> refused() const;  // by the word above
  std::size_t stuck() const;
  std::string hung() const;  // the path of a file whose read is stuck for `hung_seconds`, or empty

 private:
  using Clock = std::chrono::steady_clock;
  struct Way {  // to a file
    void* handle = nullptr;
    bool is_opened = false;  // or refused
    int failures = 0;  // in a row
    bool closed = false;
  };
  struct Stuck {
    std::string path;
    Clock::time_point since;
  };
  struct State;  // outlives the reader if a read is stuck

  static void serve(const std::shared_ptr<State>& state);
  static void watch(const std::shared_ptr<State>& state);
  static std::exception_ptr cancelled_error(const State& state, const Landing& landing) noexcept;
  static void end(State& state, const LandingPtr& landing, std::exception_ptr error) noexcept;
  static void bounce(const std::shared_ptr<State>& state, const LandingPtr& landing,
                     const char* word, const std::string& said) noexcept;

  const int process_ = getpid();
  const std::shared_ptr<IoEngine> engine_;
  std::shared_ptr<State> state_;
  std::thread watcher_;
};

// The road of NVIDIA's cuFile, which is loaded at the first use (dlopen): it is not needed to build
// or to load the core. One road at a time in a process. Returns null, and the reason, if it cannot
// be used. `buffer` is the device memory that is read into.
std::shared_ptr<Road> make_cufile_road(Span buffer, std::string* refusal);

// The version of cuFile ("1.14"), or an empty string and the reason.
std::string cufile_version(std::string* refusal);

}  // namespace infinity
