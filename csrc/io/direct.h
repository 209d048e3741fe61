// DirectReader: brings parts of extents into a device's memory, past the host's where a road leads there.
//
//   road      moves bytes from a file straight into the device's memory, from a thread that waits: cuFile
//   bounce    the I/O engine's way: into pinned host memory, from where the device copies them. What no road takes goes this way
//   landing   one read: it ends whole and verified in one of its two places, the device's or the host's, or with an error; never
//             half here and half there
//   refusal   why a landing went by bounce: "short", "late", "refused", "misaligned", "unwritten" (its space is reserved, but nothing
//             was sent there), "changed" (the checksums differ; by bounce they are held against what was written once more) or "closed"
//   closed    a road to a file that was late once, brought other bytes once, or failed kMostFailures times in a row, is not taken again
//   turn      of a piece that a device cannot verify, and the host samples: which part of its bytes this read copies out and verifies. After
//             `sampled` reads of the piece each part had its turn
//   stuck     a read of a road that was given up as late. It may still write to its place on the device: the landing's memory is held
//             until it returns
//
// Everything here runs on threads of the reader's own, the checksums too: whoever waits for a landing has nothing left to verify.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
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

  // Opens the road to a file. Null and why not. One thread at a time.
  virtual void* open(const File& file, std::string* refusal) = 0;
  // Bytes that were read, or -errno; below -kRoadError, minus an error of the road's own. Any thread, any number of them; returns
  // when the device's memory has the bytes.
  virtual std::int64_t read(void* handle, std::byte* device, std::size_t nbytes, std::uint64_t offset) = 0;
  // Lets go of the files and of the device's memory, while both are still there. It is not used after this; a second call does nothing.
  virtual void close() {}
};

class Landing {
 public:
  TicketPtr ticket() const { return ticket_; }
  // Where the bytes are. Once the ticket has finished without an error.
  bool on_device() const { return on_device_; }

 private:
  friend class DirectReader;
  enum class Stage { kBefore, kWaiting, kRunning, kBounced, kOver };

  std::shared_ptr<const Extent> extent_;
  std::size_t at_ = 0;
  Span host_;
  std::byte* device_ = nullptr;
  std::vector<Request> requests_;
  std::shared_ptr<void> memory_;
  TicketPtr ticket_, bounced_;
  Stage stage_ = Stage::kBefore;
  std::chrono::steady_clock::time_point since_;  // it waits for a thread of the road's
  bool on_device_ = false;
};
using LandingPtr = std::shared_ptr<Landing>;

struct DirectOptions {
  int threads = 8;           // reads of the road at once
  double late_seconds = 10;  // after which one is given up
  double hung_seconds = 120; // after which what is stuck will not return
  int device = 0;            // that the threads enter
  bool checksums = true;     // are kept: what comes is verified
  int sampled = 0;           // reads in which each byte is verified once, where the device takes no checksums. 0: it has to
};

struct Refusals {
  std::uint64_t count = 0;
  std::string first;  // of them: what was read, and what was said
};

class DirectReader {
 public:
  static constexpr int kMostFailures = 8;

  // `road`: null where there is none. Throws StorageError where the system has no thread to give.
  DirectReader(std::shared_ptr<IoEngine> engine, std::shared_ptr<Road> road, DeviceCalls calls, const DirectOptions& options);
  ~DirectReader();
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;

  // Reads `host.nbytes` of `extent` from byte `at` on, once the writes under way there, and `after`, are over without error. `host` and
  // `device` are both the landing's until it is over; `memory` is what they lie in. The extent is not written meanwhile.
  LandingPtr read(const std::shared_ptr<const Extent>& extent, std::size_t at, Span host, std::byte* device, const TicketPtr& after,
                  const std::shared_ptr<void>& memory);

  // Takes back what has not started: it fails with ECANCELED. What has started finishes.
  void cancel(const LandingPtr& landing);

  // Returns when nothing is under way, and ends the threads; but those of stuck reads, which go on. A second call does nothing.
  void shut_down();

  bool is_ours() const { return getpid() == process_; }
  std::uint64_t nbytes() const;                     // that came by the road
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
  struct State;  // outlives the reader where a read is stuck

  static void serve(const std::shared_ptr<State>& state);
  static void watch(const std::shared_ptr<State>& state);
  static std::exception_ptr cancelled_error(const State& state, const Landing& landing);
  static void end(State& state, const LandingPtr& landing, std::exception_ptr error);
  static void bounce(const std::shared_ptr<State>& state, const LandingPtr& landing, const char* word, const std::string& said);

  const int process_ = getpid();
  std::shared_ptr<State> state_;
  std::thread watcher_;
};

// NVIDIA's library, looked up when it is first needed (dlopen): nothing of it has to be there to build or to load the core. One at a time
// in a process. Null where it cannot be used: `refusal` says why. `buffer` is the memory on the device that is read into.
std::shared_ptr<Road> make_cufile_road(Span buffer, std::string* refusal);

// Its version ("1.14"), or empty and why it cannot be used.
std::string cufile_version(std::string* refusal);

}  // namespace infinity
