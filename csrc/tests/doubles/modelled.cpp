// The modelled backend: holds every result back until a disk of the modelled rate would have it.
//
// Each disk has a clock: the time until which it is busy. A piece advances the clock by its bytes
// over the rate, and completes when that time has come and its bytes have moved. The clocks are in
// a file that several processes map.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <unordered_map>

#include "base/check.h"
#include "tests/doubles/doubles.h"

namespace infinity::doubles {
namespace {

constexpr std::size_t kMaxModels = kBlockNbytes / sizeof(std::uint64_t);

// Nanoseconds of a clock that all processes of the machine have in common.
std::uint64_t now() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

class ModelledBackend final : public Backend {
 public:
  ModelledBackend(std::unique_ptr<Backend> inner, std::vector<DiskModel> models,
                  const std::string& clocks)
      : inner_(std::move(inner)), models_(std::move(models)) {
    INFINITY_REQUIRE(models_.size() <= kMaxModels, models_.size(), " modelled disks are more than ",
                     kMaxModels);
    for (const DiskModel& model : models_)
      INFINITY_REQUIRE(model.rate > 0, "a modelled disk of ", model.rate, " bytes per second at ",
                       model.folder);
    const int descriptor = open(clocks.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0)
      throw StorageError(errno, clocks,
                         concat("cannot open the clocks of modelled disks, ", clocks));
    const bool sized = ftruncate(descriptor, kBlockNbytes) == 0;
    void* mapped =
        sized ? mmap(nullptr, kBlockNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0)
              : MAP_FAILED;
    const int error = errno;
    close(descriptor);
    if (mapped == MAP_FAILED)
      throw StorageError(error, clocks,
                         concat("cannot map the clocks of modelled disks, ", clocks));
    clocks_ = static_cast<std::atomic<std::uint64_t>*>(mapped);
  }
  ~ModelledBackend() override { munmap(static_cast<void*>(clocks_), kBlockNbytes); }

  const char* name() const override { return inner_->name(); }

  void add_queue(const std::string& device) override {
    const auto model = std::find_if(models_.begin(), models_.end(), [&](const DiskModel& each) {
      return modelled_device({each}, each.folder) == device;
    });
    model_of_queue_.push_back(model == models_.end() ? -1
                                                     : static_cast<int>(model - models_.begin()));
    inner_->add_queue(device);
  }

  void start(std::uint32_t id, const Piece& piece, int descriptor) override {
    const int model = model_of_queue_.at(piece.queue);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      due_[id] = model < 0 ? 0 : due(model, piece.nbytes);
    }
    inner_->start(id, piece, descriptor);
  }

  void flush() override { inner_->flush(); }

  void wait(std::vector<PieceResult>& results, double seconds) override {
    const std::uint64_t at = now(), next = next_due();
    std::vector<PieceResult> arrived;
    if (next > at) inner_->wait(arrived, std::min(seconds, static_cast<double>(next - at) * 1e-9));
    std::lock_guard<std::mutex> lock(mutex_);
    for (const PieceResult& result : arrived) {
      held_.push_back({due_[result.id], result});
      due_.erase(result.id);
    }
    const std::uint64_t later = now();
    const auto kept = std::stable_partition(held_.begin(), held_.end(),
                                            [&](const Held& held) { return held.due > later; });
    for (auto held = kept; held != held_.end(); ++held) results.push_back(held->result);
    held_.erase(kept, held_.end());
  }

  void wake() override { inner_->wake(); }
  std::vector<std::uint32_t> queued() override { return inner_->queued(); }
  bool take_back(std::uint32_t id) override { return inner_->take_back(id); }
  void give_up(std::uint32_t id) noexcept override { inner_->give_up(id); }
  void abandon() override { inner_->abandon(); }
  std::string register_files(const std::vector<int>& files) override {
    return inner_->register_files(files);
  }
  std::string register_buffers(const std::vector<Span>& spans) override {
    return inner_->register_buffers(spans);
  }
  void forget_file(int file) override { inner_->forget_file(file); }

 private:
  struct Held {
    std::uint64_t due;
    PieceResult result;
  };

  std::uint64_t due(int model, std::size_t nbytes) {
    const auto takes =
        static_cast<std::uint64_t>(static_cast<double>(nbytes) / models_[model].rate * 1e9);
    std::atomic<std::uint64_t>& clock = clocks_[model];
    std::uint64_t busy = clock.load(), over;
    do over = std::max(busy, now()) + takes;
    while (!clock.compare_exchange_weak(busy, over));
    return over;
  }

  std::uint64_t next_due() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::uint64_t next = ~std::uint64_t{0};
    for (const Held& held : held_) next = std::min(next, held.due);
    return next;
  }

  std::unique_ptr<Backend> inner_;
  const std::vector<DiskModel> models_;
  std::vector<int> model_of_queue_;  // -1: a real disk
  std::atomic<std::uint64_t>* clocks_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<std::uint32_t, std::uint64_t> due_;  // of what was started
  std::vector<Held> held_;
};

}  // namespace

std::string modelled_device(const std::vector<DiskModel>& models, const std::string& path) {
  for (const DiskModel& model : models)
    if (path.compare(0, model.folder.size(), model.folder) == 0 &&
        (path.size() == model.folder.size() || path[model.folder.size()] == '/'))
      return "model " + model.folder;
  return "";
}

std::unique_ptr<Backend> make_modelled_backend(std::unique_ptr<Backend> inner,
                                               std::vector<DiskModel> models,
                                               const std::string& clocks) {
  return std::make_unique<ModelledBackend>(std::move(inner), std::move(models), clocks);
}

}  // namespace infinity::doubles
