// For LD_PRELOAD: an open() as of a file system without O_TMPFILE and, where NO_DIRECT is set, without O_DIRECT.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

static int open_as_told(const char* path, int flags, mode_t mode) {
  int (*next)(const char*, int, ...) = (int (*)(const char*, int, ...))dlsym(RTLD_NEXT, "open");
  if ((flags & O_TMPFILE) == O_TMPFILE) {
    errno = EOPNOTSUPP;
    return -1;
  }
  if ((flags & O_DIRECT) && getenv("NO_DIRECT")) {
    if (flags & O_CREAT) close(next(path, flags & ~O_DIRECT, mode));  // the file is made, and the open refused
    errno = EINVAL;
    return -1;
  }
  return next(path, flags, mode);
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = va_arg(more, mode_t);
  va_end(more);
  return open_as_told(path, flags, mode);
}

int open64(const char* path, int flags, ...) __attribute__((alias("open")));
