// Backend: what moves one piece between memory and a file. The engine above it splits requests into pieces,
// continues short transfers and reads every result; a backend only starts pieces and hands back their results.
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

  // Starts `piece`. Calls come one at a time (the engine holds its lock) and never block on the transfer. `piece`
  // stays at its address until its result was returned by `wait`.
  virtual void start(std::uint32_t id, const Piece& piece, int descriptor) = 0;

  // A device whose pieces will say `queue`: queues are numbered from 0 in the order of these calls. What serves one is not to wait
  // for another.
  virtual void add_queue(const std::string& /*device*/) {}

  // Hands what `start` queued to the kernel.
  virtual void flush() {}

  // Blocks until there is a result, `wake` was called or `seconds` have passed; appends what there is. Called by one
  // thread only.
  virtual void wait(std::vector<PieceResult>& results, double seconds) = 0;
  virtual void wake() = 0;

  // Started pieces that nothing has handed to the kernel yet: their device cannot be blamed.
  virtual std::vector<std::uint32_t> queued() { return {}; }

  // Forgets a queued piece: it will have no result. False when it reached the kernel after all.
  virtual bool take_back(std::uint32_t) { return false; }

  // The engine gave a piece up: what was serving it is not to be waited for by others.
  virtual void give_up(std::uint32_t) {}

  // Forgets what has not reached the kernel: the device is hung, and its descriptors and memory are no longer to be
  // used. The backend is not used after this, and never destroyed: its threads may wait for the device for ever.
  virtual void abandon() {}

  // Told once the set of files or staging buffers is known. Returns why not, or an empty string.
  virtual std::string register_files(const std::vector<int>&) { return "this engine has no file table"; }
  virtual std::string register_buffers(const std::vector<Span>&) { return "this engine has no buffer table"; }

  // Has the table of files let go of one that nothing more is started of, but for the rest of what has been.
  virtual void forget_file(int) {}
};

// Null where the build or the kernel has no io_uring; then `why` says so.
std::unique_ptr<Backend> make_uring_backend(unsigned depth, std::string& why);
std::unique_ptr<Backend> make_threads_backend(int thread_count);

// Chooses an engine's backend in place of the engine. Test doubles of disks are made this way
// (csrc/tests/doubles, which is in no wheel). Calls are thread-safe, and an object does not change.
class BackendLayer {
 public:
  virtual ~BackendLayer() = default;

  // Returns the backend. `real` makes the one that the engine's options name.
  virtual std::unique_ptr<Backend> make(const std::function<std::unique_ptr<Backend>()>& real) const = 0;

  // Names the device that `path` is on. Empty: the kernel's name counts.
  virtual std::string device_of(const std::string& path) const = 0;
};

}  // namespace infinity
