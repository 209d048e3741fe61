// CUDA's driver, looked up when it is first needed: nothing of CUDA has to be there to build or to
// load the core.
//
// Registered memory is what the GPU copies from and to without a staging copy. Registering memory
// that is mapped already costs a fraction of what the runtime's own allocation of pinned memory
// does, and wastes nothing of it.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

namespace infinity {

class Driver {
 public:
  // Null where it cannot be used: `refusal` (not null) says why.
  static Driver* find(std::string* refusal);

  // As the driver counts them: 13000 is CUDA 13.0.
  int version() const { return version_; }

  // Makes [address, address + nbytes) copyable by every GPU, in the primary context of the one with
  // number `device`, which computes: no other gets a context. Throws StorageError with what to
  // change.
  void register_host(void* address, std::size_t nbytes, int device);
  void unregister_host(void* address, int device) noexcept;

  // Has the calling thread use the device with this number from now on. Returns 0, or the driver's
  // error.
  int enter(int device) noexcept;
  // Copies memory of the device that the calling thread has entered to any of the host's, beside
  // what runs there. Returns 0 when it is there, or the driver's error.
  int copy_out(void* host, const void* data, std::size_t nbytes) noexcept;

 private:
  Driver() = default;
  std::string load();  // empty, or why not
  std::string text(int error) const;
  int find_context(int device, void** context) noexcept;
  void* context_of(int device);

  struct Functions {
    int (*init)(unsigned);
    int (*version)(int*);
    int (*device_count)(int*);
    int (*retain_context)(void**, int);
    int (*push_context)(void*);
    int (*pop_context)(void**);
    int (*register_host)(void*, std::size_t, unsigned);
    int (*unregister_host)(void*);
    int (*create_stream)(void**, unsigned);
    int (*destroy_stream)(void*);
    int (*copy_out)(void*, unsigned long long, std::size_t, void*);
    int (*await_stream)(void*);
    int (*error_string)(int, const char**);
  };
  Functions functions_{};
  std::mutex mutex_;
  std::map<int, void*> contexts_;  // by device; they stay
  int version_ = 0;
};

}  // namespace infinity
