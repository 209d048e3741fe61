// Backend: moves one piece between memory and a file. The engine above it splits requests into
// pieces, continues short transfers and reads every result; a backend starts pieces and returns
// their results.
//
// Thread safety: the engine calls every function with its mutex held, so one at a time, except for
// `wait`: the engine's completion thread calls it, beside all others. A backend's own mutex is the
// last in the lock order (io/engine.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/span.h"

namespace infinity {

constexpr unsigned kMaxInFlight = 4096;  // pieces of one engine, over all devices

enum class Op : std::uint8_t { kRead, kWrite };

struct Piece {
  Op op = Op::kRead;
  int file = -1;  // index given by the engine
  int queue = -1;  // of the file's device
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
};

struct PieceResult {
  std::uint32_t id;
  std::int64_t result;  // bytes moved, or -errno
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;

  // Starts `piece`, without blocking on the transfer. Throws std::bad_alloc if it was not started.
  virtual void start(std::uint32_t id, const Piece& piece, int descriptor) = 0;

  // Adds the queue of a device. Queues are numbered from 0 in the order of these calls; pieces name
  // theirs. The pieces of one queue must not wait for those of another.
  virtual void add_queue(const std::string& /*device*/) {}

  // Submits the started pieces to the kernel. What it has no memory for is tried again by a later
  // call: there is one at least after each `wait`.
  virtual void flush() {}

  // Blocks until there is a result, `wake` was called or `seconds` have passed. Appends the
  // results. No result is lost if it throws std::bad_alloc.
  virtual void wait(std::vector<PieceResult>& results, double seconds) = 0;
  virtual void wake() = 0;

  // The started pieces that the kernel does not have yet: their device cannot be late.
  virtual std::vector<std::uint32_t> queued() { return {}; }

  // Cancels a queued piece, which then has no result. Returns false if the kernel has it already.
  virtual bool take_back(std::uint32_t) { return false; }

  // Gives a late piece up: other pieces must not wait for the thread that serves it.
  virtual void give_up(std::uint32_t) noexcept {}

  // Cancels the pieces that the kernel does not have: the device is hung. The backend is not used
  // after this, and never destroyed, because its threads may wait for the device for ever.
  virtual void abandon() {}

  // Registers the files or the staging buffers. Returns why it could not, or an empty string.
  virtual std::string register_files(const std::vector<int>&) {
    return "this engine has no file table";
  }
  virtual std::string register_buffers(const std::vector<Span>&) {
    return "this engine has no buffer table";
  }

  // Unregisters the file once its last piece has completed. No new transfers will use it. Changes
  // nothing if it throws.
  virtual void forget_file(int) {}
};

// Null if the build or the kernel has no io_uring; `why` is then the reason.
std::unique_ptr<Backend> make_uring_backend(unsigned depth, std::string& why);
std::unique_ptr<Backend> make_threads_backend(int thread_count);

// Chooses an engine's backend in place of the engine. Test doubles of disks are made this way
// (csrc/tests/doubles, which is in no wheel). Calls are thread-safe, and an object does not change.
class BackendLayer {
 public:
  virtual ~BackendLayer() = default;

  // Returns the backend. `real` makes the one that the engine's options name.
  virtual std::unique_ptr<Backend> make(
      const std::function<std::unique_ptr<Backend>()>& real) const = 0;

  // Names the device that `path` is on. Empty: the kernel's name counts.
  virtual std::string device_of(const std::string& path) const = 0;
};

}  // namespace infinity
