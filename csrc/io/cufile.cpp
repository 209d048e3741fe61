// cuFile: the road of GPUDirect Storage. A read is one blocking call; any number of threads may be
// in it.
#include <dlfcn.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/library.h"
#include "io/direct.h"

namespace infinity {
namespace {

// What cufile.h declares, as far as it is used here.
struct Status {
  int error;  // of cuFile: 0, or from 5001 on
  int cuda_error;
};
struct Description {
  int type;
  union {
    int descriptor;
    void* handle;
  };
  const void* operations;
};
constexpr int kDescriptor = 1;

struct Functions {
  Status (*open_driver)();
  Status (*close_driver)();
  Status (*version)(int*);
  Status (*open_file)(void**, Description*);
  void (*close_file)(void*);
  Status (*open_buffer)(const void*, std::size_t, int);
  Status (*close_buffer)(const void*);
  ssize_t (*read)(void*, void*, std::size_t, off_t, off_t);
};

std::string text(Status status) {
  return status.cuda_error ? concat("cuFile's error ", status.error, ", CUDA's ", status.cuda_error)
                           : concat("cuFile's error ", status.error);
}

// The library with its driver open, shared by whoever uses it.
class Library {
 public:
  static std::shared_ptr<Library> open(std::string* refusal) {
    static std::mutex mutex;
    static std::weak_ptr<Library> opened;
    const std::lock_guard lock(mutex);
    if (auto found = opened.lock()) return found;
    std::shared_ptr<Library> made(new Library);
    *refusal = made->load();
    if (!refusal->empty()) return nullptr;
    opened = made;
    return made;
  }
  ~Library() {
    if (is_open_) functions.close_driver();
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  Functions functions{};

 private:
  Library() = default;

  std::string load() {
    // never closed: it has threads
    void* library = dlopen("libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library) return concat("no cuFile: ", dlerror());
    Symbols symbols(library);
    symbols.look_up(functions.open_driver, "cuFileDriverOpen");
    symbols.look_up(functions.close_driver, "cuFileDriverClose");
    symbols.look_up(functions.version, "cuFileGetVersion");
    symbols.look_up(functions.open_file, "cuFileHandleRegister");
    symbols.look_up(functions.close_file, "cuFileHandleDeregister");
    symbols.look_up(functions.open_buffer, "cuFileBufRegister");
    symbols.look_up(functions.close_buffer, "cuFileBufDeregister");
    symbols.look_up(functions.read, "cuFileRead");
    if (!symbols.missing().empty())
      return concat("cuFile is too old: it has no ", symbols.missing());
    if (const Status status = functions.open_driver(); status.error)
      return concat("cuFile's driver does not open (", text(status), ")");
    is_open_ = true;
    return "";
  }

  bool is_open_ = false;
};

class CuFile final : public Road {
 public:
  CuFile(std::shared_ptr<Library> library, Span buffer)
      : library_(std::move(library)), buffer_(buffer) {}
  ~CuFile() override { CuFile::close(); }
  const char* name() const override { return "cuFile"; }

  void close() override {
    for (void* handle : handles_) library_->functions.close_file(handle);
    handles_.clear();
    if (std::exchange(is_registered_, false)) library_->functions.close_buffer(buffer_.data);
  }

  // Memory that is not registered would be read by way of a cache of the library's.
  std::string enter_buffer() {
    const Status status = library_->functions.open_buffer(buffer_.data, buffer_.nbytes, 0);
    if (status.error)
      return concat("cuFile does not register ", buffer_.nbytes, " bytes of the device (",
                    text(status), ")");
    is_registered_ = true;
    return "";
  }

  void* open(const File& file, std::string* refusal) override {
    if (!file.direct) {
      *refusal = "its file system has no O_DIRECT";
      return nullptr;
    }
    Description description{kDescriptor, {file.descriptor}, nullptr};
    void* handle = nullptr;
    handles_.reserve(handles_.size() + 1);
    const Status status = library_->functions.open_file(&handle, &description);
    if (status.error) {
      *refusal = concat("cuFile does not take it (", text(status), ")");
      return nullptr;
    }
    handles_.push_back(handle);
    return handle;
  }

  std::int64_t read(void* handle, std::byte* device, std::size_t nbytes,
                    std::uint64_t offset) override {
    errno = 0;
    const ssize_t moved = library_->functions.read(
        handle, buffer_.data, nbytes, static_cast<off_t>(offset), device - buffer_.data);
    if (moved >= 0 || moved < -kRoadError) return moved;
    return errno ? -errno : -EIO;
  }

 private:
  const std::shared_ptr<Library> library_;
  const Span buffer_;
  std::vector<void*> handles_;
  bool is_registered_ = false;
};

}  // namespace

std::shared_ptr<Road> make_cufile_road(Span buffer, std::string* refusal) {
  auto library = Library::open(refusal);
  if (!library) return nullptr;
  auto road = std::make_shared<CuFile>(std::move(library), buffer);
  *refusal = road->enter_buffer();
  return refusal->empty() ? road : nullptr;
}

std::string cufile_version(std::string* refusal) {
  const auto library = Library::open(refusal);
  if (!library) return "";
  int version = 0;
  if (const Status status = library->functions.version(&version); status.error) {
    *refusal = concat("cuFile does not tell its version (", text(status), ")");
    return "";
  }
  return concat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace infinity
