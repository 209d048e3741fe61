// The io_uring backend: one ring, registered buffers and files, results awaited in the kernel (no
// spinning).
#include "io/backend.h"

#ifdef INFINITY_HAVE_URING

#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>

#include "base/check.h"

namespace infinity {
namespace {

constexpr std::uint64_t kWake = ~std::uint64_t{0};
// the kernel's limit for one registered buffer
constexpr std::size_t kMaxBufferNbytes = std::size_t{1} << 30;
// until the kernel is asked again for what it had no memory for
constexpr double kRefusedSeconds = 0.001;

class UringBackend final : public Backend {
 public:
  explicit UringBackend(unsigned depth) {
    // Two entries beyond the depth of one device: one for the wake-up, one spare. More devices hand
    // theirs over in turns, but the results of all of them have room.
    io_uring_params parameters{};
    parameters.flags = IORING_SETUP_CQSIZE;
    parameters.cq_entries = 2 * kMaxInFlight;
    const int error = io_uring_queue_init_params(depth + 2, &ring_, &parameters);
    if (error < 0) throw StorageError(-error, "", "io_uring_setup");
    // else waiting with a timeout would take submission entries
    if (!(ring_.features & IORING_FEAT_EXT_ARG)) {
      io_uring_queue_exit(&ring_);
      throw StorageError(ENOSYS, "",
                         "this kernel's io_uring cannot wait with a timeout (Linux 5.11 can)");
    }
    for (int operation : {IORING_OP_NOP, IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
                          IORING_OP_WRITE_FIXED})
      if (!offers(operation)) {
        io_uring_queue_exit(&ring_);
        throw StorageError(ENOSYS, "",
                           concat("this kernel's io_uring lacks operation ", operation));
      }
  }
  ~UringBackend() override { io_uring_queue_exit(&ring_); }

  const char* name() const override { return "uring"; }

  void start(std::uint32_t id, const Piece& piece, int descriptor) override {
    io_uring_sqe* entry = next_entry();
    const bool fixed_file = piece.file < registered_files_ && !forgotten_.count(piece.file);
    const int file = fixed_file ? piece.file : descriptor;
    const int buffer = registered_buffer(piece);
    if (piece.op == Op::kRead) {
      if (buffer >= 0)
        io_uring_prep_read_fixed(entry, file, piece.data, piece.nbytes, piece.offset, buffer);
      else
        io_uring_prep_read(entry, file, piece.data, piece.nbytes, piece.offset);
    } else {
      if (buffer >= 0)
        io_uring_prep_write_fixed(entry, file, piece.data, piece.nbytes, piece.offset, buffer);
      else
        io_uring_prep_write(entry, file, piece.data, piece.nbytes, piece.offset);
    }
    if (fixed_file) entry->flags |= IOSQE_FIXED_FILE;
    entry->user_data = id;
  }

  // The kernel may take fewer entries than there are: it stops at one that it refuses, whose result
  // says so, and where it has no memory, or no room for results until some have been read.
  void flush() override {
    while (io_uring_sq_ready(&ring_) > 0) {
      const int submitted = io_uring_submit(&ring_);
      refused_ = submitted == 0 || submitted == -EAGAIN || submitted == -EBUSY;
      if (refused_) return;
      if (submitted < 0 && submitted != -EINTR)
        throw StorageError(-submitted, "", "io_uring_enter");
    }
    refused_ = false;
  }

  std::vector<std::uint32_t> queued() override {
    std::vector<std::uint32_t> ids;
    for (unsigned left = io_uring_sq_ready(&ring_); left > 0; --left) {
      const auto& entry = ring_.sq.sqes[(ring_.sq.sqe_tail - left) & *ring_.sq.kring_mask];
      if (entry.user_data != kWake) ids.push_back(static_cast<std::uint32_t>(entry.user_data));
    }
    return ids;
  }

  void wait(std::vector<PieceResult>& results, double seconds) override {
    if (refused_) seconds = std::min(seconds, kRefusedSeconds);  // `flush` comes next
    const auto whole = static_cast<long long>(seconds);
    __kernel_timespec timeout{whole,
                              static_cast<long long>((seconds - static_cast<double>(whole)) * 1e9)};
    io_uring_cqe* completion = nullptr;
    const int error = io_uring_wait_cqe_timeout(&ring_, &completion, &timeout);
    if (error == -ETIME || error == -EINTR || error == -EAGAIN) return;
    if (error < 0) throw StorageError(-error, "", "io_uring_wait_cqe");
    do {
      if (completion->user_data != kWake)
        results.push_back({static_cast<std::uint32_t>(completion->user_data), completion->res});
      io_uring_cqe_seen(&ring_, completion);
    } while (io_uring_peek_cqe(&ring_, &completion) == 0);
  }

  void wake() override {
    io_uring_sqe* entry = next_entry();
    io_uring_prep_nop(entry);
    entry->user_data = kWake;
    flush();
  }

  std::string register_files(const std::vector<int>& descriptors) override {
    if (registered_files_) io_uring_unregister_files(&ring_);
    registered_files_ = 0;
    if (descriptors.empty()) return "";
    const int error = io_uring_register_files(&ring_, descriptors.data(), descriptors.size());
    if (error < 0) return concat("io_uring_register_files: ", std::strerror(-error));
    registered_files_ = static_cast<int>(descriptors.size());
    return "";
  }

  void forget_file(int file) override {
    forgotten_.insert(file);
    int none = -1;
    // What is in flight keeps its own reference. Refused, the table keeps the file's space until
    // the engine's end.
    if (file < registered_files_)
      (void)io_uring_register_files_update(&ring_, static_cast<unsigned>(file), &none, 1);
  }

  std::string register_buffers(const std::vector<Span>& spans) override {
    unregister_buffers();
    std::size_t total = 0;
    for (const Span& span : spans) total += span.nbytes;
    std::vector<iovec> table = table_of(spans, total);
    if (table.empty()) return "";
    const int error = io_uring_register_buffers(&ring_, table.data(), table.size());
    if (error == -ENOMEM) return register_what_fits(spans, total);
    if (error < 0) return concat("io_uring_register_buffers: ", std::strerror(-error));
    buffers_ = std::move(table);
    return "";
  }

 private:
  void unregister_buffers() {
    if (!buffers_.empty()) io_uring_unregister_buffers(&ring_);
    buffers_.clear();
  }

  bool offers(int operation) {
    io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
    const bool found = probe && io_uring_opcode_supported(probe, operation);
    if (probe) io_uring_free_probe(probe);
    return found;
  }

  // The first `nbytes` of the spans as one table, in as few buffers as the kernel allows.
  static std::vector<iovec> table_of(const std::vector<Span>& spans, std::size_t nbytes) {
    std::vector<iovec> table;
    for (const Span& span : spans)
      for (std::size_t at = 0; at < span.nbytes && nbytes; at += table.back().iov_len) {
        table.push_back({span.data + at, std::min({kMaxBufferNbytes, span.nbytes - at, nbytes})});
        nbytes -= table.back().iov_len;
      }
    return table;
  }

  // The memlock limit is too low for everything: as much from the front as it allows, within a MiB.
  std::string register_what_fits(const std::vector<Span>& spans, std::size_t total) {
    constexpr std::size_t kStep = 1024 * 1024;
    std::size_t fits = 0, too_much = total / kStep + 1;
    while (too_much - fits > 1) {
      const std::size_t tried = fits + (too_much - fits) / 2;
      unregister_buffers();
      buffers_ = table_of(spans, tried * kStep);
      const int error = io_uring_register_buffers(&ring_, buffers_.data(), buffers_.size());
      if (error < 0) buffers_.clear();
      if (error < 0 && error != -ENOMEM)
        return concat("io_uring_register_buffers: ", std::strerror(-error));
      (error < 0 ? too_much : fits) = tried;
    }
    if (fits && buffers_.empty()) {
      buffers_ = table_of(spans, fits * kStep);
      if (io_uring_register_buffers(&ring_, buffers_.data(), buffers_.size()) < 0) buffers_.clear();
    }
    return concat("io_uring_register_buffers: ", buffers_.empty() ? 0 : fits, " MiB of ",
                  total / kStep,
                  " MiB were registered, the memlock limit allows no more; the rest costs more "
                  "processor time (see "
                  "`ulimit -l`; raise it in limits.conf or with LimitMEMLOCK=infinity)");
  }

  io_uring_sqe* next_entry() {
    for (;;) {
      if (io_uring_sqe* entry = io_uring_get_sqe(&ring_)) return entry;
      flush();  // queued entries fill the ring: handed over, they free it
      if (refused_) std::this_thread::sleep_for(std::chrono::duration<double>(kRefusedSeconds));
    }
  }

  int registered_buffer(const Piece& piece) const {
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      const auto* base = static_cast<std::byte*>(buffers_[i].iov_base);
      if (piece.data >= base && piece.data + piece.nbytes <= base + buffers_[i].iov_len)
        return static_cast<int>(i);
    }
    return -1;
  }

  io_uring ring_{};
  int registered_files_ = 0;  // the first so many of the engine's files
  std::set<int> forgotten_;
  std::vector<iovec> buffers_;
  std::atomic<bool> refused_{false};  // there are entries that the kernel did not take yet
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(unsigned depth, std::string& why) {
  try {
    return std::make_unique<UringBackend>(depth);
  } catch (const StorageError& error) {
    why = concat("the kernel refused io_uring (", error.what(),
                 error.error_number == EPERM || error.error_number == EACCES
                     ? "): allow it with sysctl kernel.io_uring_disabled=0 or in the container's "
                       "seccomp profile"
                 : error.error_number == ENOMEM ? "): raise the memlock limit, see `ulimit -l`"
                                                : ")");
    return nullptr;
  }
}

}  // namespace infinity

#else

namespace infinity {

std::unique_ptr<Backend> make_uring_backend(unsigned, std::string& why) {
  why = "built without liburing: install liburing-dev (or set LIBURING_ROOT) and build again";
  return nullptr;
}

}  // namespace infinity

#endif
