// OpenFile: a descriptor that is closed with the last that refers to it, so that no transfer can meet another file of its number.
#pragma once

#include <unistd.h>

#include <atomic>
#include <system_error>
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
      } catch (const std::system_error&) {  // no thread is to be had
      }
    }
    close(descriptor_);
  }

  int descriptor() const { return descriptor_; }

  // Has it closed behind whoever lets go last: a file system takes long to free the space of a large file.
  void close_behind() { behind_ = true; }

 private:
  const int descriptor_;
  std::atomic<bool> behind_{false};
};

}  // namespace infinity
