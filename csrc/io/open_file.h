// OpenFile: a descriptor that closes with its last owner, so that no running transfer can meet
// another file with the same number. Thread-safe: it does not change but for an atomic flag.
#pragma once

#include <unistd.h>

#include <atomic>
#include <thread>

namespace infinity {

class OpenFile {
 public:
  explicit OpenFile(int descriptor) : descriptor_(descriptor) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (behind_) {
      try {
        std::thread(close, descriptor_).detach();
        return;
      } catch (...) {  // the system has no thread, or no memory for one
      }
    }
    close(descriptor_);
  }

  int descriptor() const { return descriptor_; }

  // Has a thread of its own close it after the last owner: a file system takes long to free a large
  // file.
  void close_behind() { behind_ = true; }

 private:
  const int descriptor_;
  std::atomic<bool> behind_{false};
};

}  // namespace infinity
