// Memory of the late device: mapped twice. Where tensors point, the host can neither read nor write
// it (SIGSEGV); jobs use the other mapping.
//
// Freed blocks go to the cache of their stream at once, as in torch's allocator, and are
// overwritten in the order of that stream, as a later kernel would. An allocation can be made to
// fail, and what is left be made little: what is cached counts as free, since torch's allocator
// splits it, and gives it back before it fails.
#pragma once

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "streams.h"

namespace late {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr std::size_t kCapacity = std::size_t{6} << 30;  // address space: pages come when used
constexpr std::size_t kGranule = 512;
constexpr int kFreed = 0xFF;  // of all bytes: a NaN in every format

class Memory {
 public:
  static Memory& all() {
    static auto* memory = new Memory;
    return *memory;
  }

  std::atomic<long> fail_in{-1};  // allocations until one fails; negative: none does
  std::atomic<long> asked{0}, fresh{0}, reused{0};

  bool has(const void* place) const {
    auto* byte = static_cast<const char*>(place);
    return byte >= seen_ && byte < seen_ + kCapacity;
  }
  // Where jobs find the memory that tensors see at ``place``.
  void* usable(const void* place) const {
    return place ? used_ + (static_cast<const char*>(place) - seen_) : nullptr;
  }
  // Of living tensors: now, and the most since the last ``reset_peak``.
  std::size_t live_nbytes() {
    std::lock_guard hold(mutex_);
    return live_;
  }
  std::size_t peak_nbytes() {
    std::lock_guard hold(mutex_);
    return peak_;
  }
  void reset_peak() {
    std::lock_guard hold(mutex_);
    peak_ = live_;
  }
  std::size_t free_nbytes() {
    std::lock_guard hold(mutex_);
    return capacity_ - live_;
  }
  // Leaves ``nbytes``; 0: all.
  void leave(std::size_t nbytes) {
    std::lock_guard hold(mutex_);
    capacity_ = nbytes ? std::min(kCapacity, live_ + nbytes) : kCapacity;
  }

  void* allocate(std::size_t nbytes, int device) {
    ++asked;
    if (fail_in >= 0 && fail_in-- == 0)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "late: this allocation was made to fail");
    const std::size_t size =
        (std::max<std::size_t>(nbytes, 1) + kGranule - 1) / kGranule * kGranule;
    Stream* stream = stream_of(device);
    std::lock_guard hold(mutex_);
    TORCH_CHECK_WITH(OutOfMemoryError, live_ + size <= capacity_, "late: out of memory");
    auto& cached = caches_[stream][size];
    char* place;
    if (!cached.empty()) {
      place = cached.back();
      cached.pop_back();
      ++reused;
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, taken_ + size <= kCapacity, "late: out of addresses");
      place = seen_ + taken_;
      taken_ += size;
      ++fresh;
    }
    blocks_[place] = {size, stream, {}};
    live_ += size;
    peak_ = std::max(peak_, live_);
    return place;
  }

  // Notes that ``stream`` uses the memory of a tensor that belongs to another one.
  void record(const void* data, Stream* stream) {
    std::lock_guard hold(mutex_);
    auto after = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (after != blocks_.begin()) (--after)->second.users.insert(stream);
  }

  static void release(void* place) {
    if (place) all().give_back(static_cast<char*>(place));
  }

 private:
  struct Block {
    std::size_t size;
    Stream* owner;
    std::set<Stream*> users;
  };

  Memory() {
    int file = memfd_create("late-device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kCapacity) == 0, "no memory for a late device");
    auto map = [file](int access) {
      void* place = mmap(nullptr, kCapacity, access, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(place != MAP_FAILED, "no addresses for a late device");
      return static_cast<char*>(place);
    };
    seen_ = map(PROT_NONE);
    used_ = map(PROT_READ | PROT_WRITE);
    close(file);
  }

  void give_back(char* place) {
    Block block;
    {
      std::lock_guard hold(mutex_);
      block = blocks_.at(place);
      blocks_.erase(place);
    }
    for (Stream* user : block.users) block.owner->wait_for(user->mark());
    block.owner->put([to = usable(place), size = block.size] { std::memset(to, kFreed, size); });
    std::lock_guard hold(mutex_);
    caches_[block.owner][block.size].push_back(place);
    live_ -= block.size;
  }

  char *seen_, *used_;
  std::mutex mutex_;
  std::size_t taken_ = 4096, live_ = 0, peak_ = 0, capacity_ = kCapacity;
  std::map<char*, Block> blocks_;
  std::map<Stream*, std::map<std::size_t, std::vector<char*>>> caches_;
};

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* place = nbytes ? Memory::all().allocate(nbytes, current_device) : nullptr;
    return {place, place, &Memory::release, c10::Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::release; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "late: a copy without a stream");
  }
};
inline Allocator allocator;

// Host memory that was registered: copies from and to it do not wait.
class Registered {
 public:
  // Host memory that is registered from its allocation on: what torch calls pinned.
  static c10::DataPtr allocate(std::size_t nbytes) {
    auto* memory = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    all().add(memory, nbytes);
    return {memory, memory, &give_back, c10::DeviceType::CPU};
  }
  static void give_back(void* memory) {
    if (!memory) return;
    all().remove(memory);
    std::free(memory);
  }
  static Registered& all() {
    static auto* registered = new Registered;
    return *registered;
  }
  void add(void* place, std::size_t nbytes) {
    std::lock_guard hold(mutex_);
    ranges_[static_cast<char*>(place)] = nbytes;
  }
  void remove(void* place) {
    std::lock_guard hold(mutex_);
    ranges_.erase(static_cast<char*>(place));
  }
  bool has(const void* place, std::size_t nbytes) {
    std::lock_guard hold(mutex_);
    auto* byte = static_cast<const char*>(place);
    auto after = ranges_.upper_bound(const_cast<char*>(byte));
    if (after == ranges_.begin()) return false;
    auto [begin, size] = *--after;
    return byte + nbytes <= begin + size;
  }

 private:
  std::mutex mutex_;
  std::map<char*, std::size_t> ranges_;
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override { return Registered::allocate(nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &Registered::give_back; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};
inline PinnedAllocator pinned_allocator;

}  // namespace late
