#include "memory/driver.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdint>
#include <new>

#include "base/check.h"
#include "base/library.h"

namespace infinity {
namespace {

constexpr int kOldestVersion = 12000;  // what the kernels' runtime needs
constexpr unsigned kPortable = 1;  // registered for every context
constexpr unsigned kNonBlocking = 1;  // a stream that waits for no other
constexpr int kOutOfMemory = 2, kNotPermitted = 800, kNotSupported = 801;

// The context is current for the length of one call; the thread's own is put back.
class Current {
 public:
  Current(int (*push)(void*), int (*pop)(void**), void* context)
      : pop_(pop), pushed_(push(context) == 0) {}
  ~Current() {
    void* previous = nullptr;
    if (pushed_) pop_(&previous);
  }

 private:
  int (*pop_)(void**);
  bool pushed_;
};

}  // namespace

Driver* Driver::find(std::string* refusal) {
  static std::mutex mutex;
  static Driver driver;
  static bool tried = false;
  static std::string reason;
  const std::lock_guard lock(mutex);
  if (!tried) {
    reason = driver.load();
    tried = true;
  }
  *refusal = reason;
  return reason.empty() ? &driver : nullptr;
}

std::string Driver::load() {
  // never closed: it does not survive that
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return concat("no CUDA driver: ", dlerror());
  Symbols symbols(library);
  symbols.look_up(functions_.init, "cuInit");
  symbols.look_up(functions_.version, "cuDriverGetVersion");
  symbols.look_up(functions_.device_count, "cuDeviceGetCount");
  symbols.look_up(functions_.retain_context, "cuDevicePrimaryCtxRetain");
  symbols.look_up(functions_.push_context, "cuCtxPushCurrent_v2");
  symbols.look_up(functions_.pop_context, "cuCtxPopCurrent_v2");
  symbols.look_up(functions_.register_host, "cuMemHostRegister_v2");
  symbols.look_up(functions_.unregister_host, "cuMemHostUnregister");
  symbols.look_up(functions_.create_stream, "cuStreamCreate");
  symbols.look_up(functions_.destroy_stream, "cuStreamDestroy_v2");
  symbols.look_up(functions_.copy_out, "cuMemcpyDtoHAsync_v2");
  symbols.look_up(functions_.await_stream, "cuStreamSynchronize");
  symbols.look_up(functions_.error_string, "cuGetErrorString");
  if (!symbols.missing().empty())
    return concat("the CUDA driver has no ", symbols.missing(),
                  ": it is too old, install a newer one");
  if (const int error = functions_.init(0))
    return concat("the CUDA driver does not start: ", text(error));
  if (const int error = functions_.version(&version_))
    return concat("the CUDA driver does not tell its version: ", text(error));
  if (version_ < kOldestVersion)
    return concat("the CUDA driver is of CUDA ", version_ / 1000, ".", version_ % 1000 / 10,
                  ", but 12.0 or newer is needed");
  int devices = 0;
  if (const int error = functions_.device_count(&devices))
    return concat("the CUDA driver finds no device: ", text(error));
  if (devices == 0) return "the CUDA driver finds no device";
  return "";
}

std::string Driver::text(int error) const {
  const char* told = nullptr;
  if (functions_.error_string(error, &told) != 0 || !told) told = "unknown error";
  return concat(told, " (CUDA error ", error, ")");
}

int Driver::find_context(int device, void** context) noexcept {
  const std::lock_guard lock(mutex_);
  if (const auto found = contexts_.find(device); found != contexts_.end()) {
    *context = found->second;
    return 0;
  }
  try {
    const auto made = contexts_.emplace(device, nullptr).first;
    const int error = functions_.retain_context(context, device);
    if (error == 0)
      made->second = *context;
    else
      contexts_.erase(made);
    return error;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

void* Driver::context_of(int device) {
  void* context = nullptr;
  if (const int error = find_context(device, &context))
    throw StorageError(ENODEV, "", concat("GPU ", device, " cannot be used: ", text(error)));
  return context;
}

int Driver::enter(int device) noexcept {
  void* context = nullptr;
  if (const int error = find_context(device, &context)) return error;
  return functions_.push_context(context);
}

int Driver::copy_out(void* host, const void* data, std::size_t nbytes) noexcept {
  struct Stream {  // of one thread
    void* handle = nullptr;
    int (*destroy)(void*) = nullptr;
    ~Stream() {  // of no account where the driver has gone
      if (handle) destroy(handle);
    }
  };
  thread_local Stream stream;
  if (!stream.handle) {
    stream.destroy = functions_.destroy_stream;
    if (const int error = functions_.create_stream(&stream.handle, kNonBlocking)) return error;
  }
  const int error =
      functions_.copy_out(host, reinterpret_cast<std::uintptr_t>(data), nbytes, stream.handle);
  return error ? error : functions_.await_stream(stream.handle);
}

void Driver::register_host(void* address, std::size_t nbytes, int device) {
  const Current current(functions_.push_context, functions_.pop_context, context_of(device));
  const int error = functions_.register_host(address, nbytes, kPortable);
  if (error == 0) return;
  std::string remedy;
  if (error == kOutOfMemory || error == kNotPermitted) {
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    const std::string told =
        limit.rlim_cur == RLIM_INFINITY ? "unlimited" : concat(limit.rlim_cur / 1024, " KiB");
    remedy = concat(". The limit of locked memory is ", told,
                    ": `ulimit -l unlimited` before the job raises it");
  } else if (error == kNotSupported) {
    remedy = ". This system does not register memory that is mapped already";
  }
  throw StorageError(
      error == kNotSupported ? ENOTSUP : ENOMEM, "",
      concat("CUDA refuses to register ", nbytes, " bytes of host memory: ", text(error), remedy));
}

void Driver::unregister_host(void* address, int device) noexcept {
  const Current current(functions_.push_context, functions_.pop_context, context_of(device));
  functions_.unregister_host(address);
}

}  // namespace infinity
