// FolderLock: an exclusive flock of a folder, held until it is closed or dies.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/check.h"

namespace infinity {

class FolderLock {
 public:
  // Opens the folder. Throws StorageError. The lock is not taken yet.
  explicit FolderLock(const std::string& path) : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    if (descriptor_ < 0) throw StorageError(errno, path, concat("cannot open the folder ", path));
  }
  ~FolderLock() { release(); }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // Takes the lock. False while somebody else has it. Throws StorageError where the file system has no locks.
  bool try_lock() {
    if (flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return true;
    if (errno == EWOULDBLOCK || errno == EINTR) return false;
    throw StorageError(errno, path_, concat("cannot lock the folder ", path_));
  }

  // Frees the lock; a second call does nothing.
  void release() {
    if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
  }

 private:
  const std::string path_;
  int descriptor_;
};

}  // namespace infinity
