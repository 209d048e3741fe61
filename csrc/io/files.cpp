#include "io/files.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <random>
#include <utility>

#include <linux/fs.h>
#include <sys/ioctl.h>

#include "base/check.h"
#include "base/span.h"

namespace infinity {
namespace {

// Some file systems accept O_DIRECT in open and refuse it in the first read. Reads one block to
// know.
bool direct_works(int descriptor) {
  alignas(kBlockNbytes) static thread_local std::byte block[kBlockNbytes];
  return pread(descriptor, block, kBlockNbytes, 0) >= 0;
}

// The kernel's name for the disk ("vda", also for its partitions), or its numbers ("8:16") if it
// has no name: a network or overlay file system.
std::string device_of(int descriptor) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0) return "unknown";
  const std::string numbers = concat(major(status.st_dev), ":", minor(status.st_dev));
  const std::string entry = "/sys/dev/block/" + numbers;
  char target[PATH_MAX];
  const ssize_t length = readlink(entry.c_str(), target, sizeof target);
  if (length <= 0) return numbers;
  std::string path(target, static_cast<std::size_t>(length));
  if (access((entry + "/partition").c_str(), F_OK) == 0) path.resize(path.rfind('/'));
  return path.substr(path.rfind('/') + 1);
}

// Copy-on-write file systems (btrfs) write every overwrite to a new place: a reservation would not
// cover it, and the disk could fill up in mid-run. The flag turns that off, for empty files only.
// Other file systems refuse the flag.
void overwrite_in_place(int descriptor) {
#ifdef FS_NOCOW_FL
  int flags = 0;
  if (ioctl(descriptor, FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  (void)ioctl(descriptor, FS_IOC_SETFLAGS, &flags);
#else
  (void)descriptor;
#endif
}

// Creates a file without a name in `folder`. Returns its descriptor, and whether it has O_DIRECT;
// or -1, with errno.
std::pair<int, bool> open_without_name(const std::string& folder) {
  for (const int direct : {O_DIRECT, 0}) {
    const int descriptor = open(folder.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC | direct, 0600);
    if (descriptor >= 0) return {descriptor, direct != 0};
  }
  // File systems without O_TMPFILE (NFS, overlays of old kernels): create the file, then unlink it.
  // If the process is killed in between, an empty file stays.
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL && errno != ENOENT)
    return {-1, false};
  static std::atomic<unsigned> count{0};
  for (int tries = 0; tries < 100; ++tries) {
    const std::string path =
        concat(folder, "/.infinity-", getpid(), "-", std::random_device{}(), "-", count++);
    for (const int direct : {O_DIRECT, 0}) {
      // A file system without O_DIRECT refuses the open, but has created the file.
      const int flags = O_RDWR | O_CREAT | O_CLOEXEC | direct | (direct ? O_EXCL : 0);
      const int descriptor = open(path.c_str(), flags, 0600);
      if (descriptor >= 0) {
        unlink(path.c_str());
        return {descriptor, direct != 0};
      }
      if (errno != EINVAL) break;
    }
    if (errno != EEXIST) break;
  }
  return {-1, false};
}

// Writes zeros, for file systems that cannot reserve. Returns 0 or an errno. The writes are whole
// aligned blocks, which O_DIRECT needs.
int write_zeros(int descriptor, std::uint64_t nbytes) {
  constexpr std::size_t kStep = 1024 * 1024;
  std::unique_ptr<void, decltype(&std::free)> zeros(std::aligned_alloc(kBlockNbytes, kStep),
                                                    &std::free);
  if (!zeros) return ENOMEM;
  std::fill_n(static_cast<std::byte*>(zeros.get()), kStep, std::byte{0});
  for (std::uint64_t at = 0; at < nbytes;) {
    const std::size_t step = std::min<std::uint64_t>(kStep, nbytes - at);
    const ssize_t written = pwrite(descriptor, zeros.get(), step, static_cast<off_t>(at));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    if (written == 0) return EIO;
    at += round_down(static_cast<std::size_t>(written), kBlockNbytes);
    // less than a block: the disk is full
    if (static_cast<std::size_t>(written) < kBlockNbytes) return ENOSPC;
  }
  return 0;
}

void reserve(int descriptor, const std::string& path, std::uint64_t nbytes) {
  int error;
  do {
    error = fallocate(descriptor, 0, 0, static_cast<off_t>(nbytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  // Not posix_fallocate: its fallback writes single bytes, which O_DIRECT refuses.
  if (error == EOPNOTSUPP || error == ENOSYS) error = write_zeros(descriptor, nbytes);
  if (error) throw StorageError(error, path, concat("cannot reserve ", nbytes, " bytes in ", path));
}

// Takes over `descriptor`, also if it throws.
File opened(int descriptor, const std::string& path, bool direct) {
  File file;
  try {
    file.open = std::make_shared<OpenFile>(descriptor);
  } catch (...) {
    close(descriptor);
    throw;
  }
  file.descriptor = descriptor;
  file.path = path;
  file.direct = direct;
  return file;
}

// Turns O_DIRECT off if reads refuse it.
void check_direct(File& file) {
  if (!file.direct || direct_works(file.descriptor)) return;
  fcntl(file.descriptor, F_SETFL, fcntl(file.descriptor, F_GETFL) & ~O_DIRECT);
  file.direct = false;
}

void check_nbytes(std::uint64_t nbytes) {
  INFINITY_REQUIRE(nbytes > 0 && nbytes % kBlockNbytes == 0, "a swap file of ", nbytes,
                   " bytes is not a positive multiple of ", kBlockNbytes);
}

// Reserves the space of an empty file.
void fill(File& file, std::uint64_t nbytes) {
  overwrite_in_place(file.descriptor);
  reserve(file.descriptor, file.path, nbytes);
  file.nbytes = nbytes;
  check_direct(file);
  file.device = device_of(file.descriptor);
}

}  // namespace

File create_named_file(const std::string& path, std::uint64_t nbytes) {
  check_nbytes(nbytes);
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  int descriptor = open(path.c_str(), flags | O_DIRECT, 0600);
  const bool direct = descriptor >= 0;
  // A file system without O_DIRECT refuses the open, but has created the file.
  if (descriptor < 0 && errno == EINVAL) descriptor = open(path.c_str(), flags & ~O_EXCL, 0600);
  if (descriptor < 0) throw StorageError(errno, path, concat("cannot create ", path));
  try {
    File file = opened(descriptor, path, direct);
    fill(file, nbytes);
    return file;
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
}

File create_unnamed_file(const std::string& folder, std::uint64_t nbytes) {
  check_nbytes(nbytes);
  const auto [descriptor, direct] = open_without_name(folder);
  if (descriptor < 0) throw StorageError(errno, folder, concat("cannot create a file in ", folder));
  File file = opened(descriptor, folder, direct);
  fill(file, nbytes);
  return file;
}

File open_existing_file(const std::string& path) {
  int descriptor = -1;
  bool direct = false;
  for (const int mode : {O_RDWR, O_RDONLY}) {
    descriptor = open(path.c_str(), mode | O_CLOEXEC | O_DIRECT);
    direct = descriptor >= 0;
    if (descriptor < 0 && errno == EINVAL) descriptor = open(path.c_str(), mode | O_CLOEXEC);
    // Another user's file, or a read-only file system: try to open it for reading alone.
    if (descriptor >= 0 || (errno != EACCES && errno != EROFS && errno != EPERM)) break;
  }
  if (descriptor < 0) throw StorageError(errno, path, concat("cannot open ", path));
  File file = opened(descriptor, path, direct);
  struct stat status{};
  if (fstat(descriptor, &status) != 0)
    throw StorageError(errno, path, concat("cannot open ", path));
  file.nbytes = round_down(static_cast<std::size_t>(status.st_size), kBlockNbytes);
  check_direct(file);
  file.device = device_of(descriptor);
  return file;
}

}  // namespace infinity
