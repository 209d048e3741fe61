/* A cuFile for tests, over memory of the host: it reads files into "the device's" memory, and fails as it is told to by fake_set. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct {
  int error, cuda_error;
} Status;
typedef struct {
  int type;
  union {
    int descriptor;
    void* handle;
  };
  const void* operations;
} Description;
typedef struct {
  int descriptor;
} Handle;

enum { DRIVER, LIMIT, BUFFER, SHORT, REFUSED, MISALIGNED, LATE, CHANGED, HALF, DEVICE, ENTER, SETTINGS };
static const char* const names[SETTINGS] = {"driver", "limit", "buffer", "short", "refused", "misaligned", "late", "changed", "half", "device", "enter"};
static const Status done = {0, 0};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long settings[SETTINGS];
static long drivers, files, buffers, reads, held, misuses, copied;
static const char* buffer_base;
static size_t buffer_nbytes;

/* driver, buffer, device, enter: the error of opening one, of a checksum on the device or a copy out of it, of a thread that enters it. limit: files that can be open at once. The others: how many reads to come fail so. */
void fake_set(const char* name, long value) {
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < SETTINGS; ++i)
    if (!strcmp(names[i], name)) settings[i] = value;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

void fake_reset(void) {
  pthread_mutex_lock(&mutex);
  memset(settings, 0, sizeof settings);
  settings[LIMIT] = 1000;
  reads = misuses = copied = 0;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

long fake_count(const char* name) {
  pthread_mutex_lock(&mutex);
  const long count = !strcmp(name, "drivers")   ? drivers
                     : !strcmp(name, "files")   ? files
                     : !strcmp(name, "buffers") ? buffers
                     : !strcmp(name, "reads")   ? reads
                     : !strcmp(name, "held")    ? held
                     : !strcmp(name, "copied")  ? copied
                                                : misuses;
  pthread_mutex_unlock(&mutex);
  return count;
}

static int takes(int what) { return settings[what] > 0 ? settings[what]-- > 0 : 0; }

Status cuFileDriverOpen(void) {
  pthread_mutex_lock(&mutex);
  Status status = {(int)settings[DRIVER], 0};
  if (!status.error) ++drivers;
  pthread_mutex_unlock(&mutex);
  return status;
}
Status cuFileDriverClose(void) {
  pthread_mutex_lock(&mutex);
  if (files || buffers) ++misuses;
  --drivers;
  pthread_mutex_unlock(&mutex);
  return done;
}
Status cuFileGetVersion(int* version) { return *version = 1140, done; }

Status cuFileHandleRegister(void** handle, Description* description) {
  pthread_mutex_lock(&mutex);
  Status status = {files >= settings[LIMIT] ? 5027 : 0, 0};
  if (!status.error) {
    Handle* made = malloc(sizeof *made);
    made->descriptor = description->descriptor;
    *handle = made;
    ++files;
    if (description->type != 1 || !(fcntl(made->descriptor, F_GETFL) & O_DIRECT)) ++misuses;
  }
  pthread_mutex_unlock(&mutex);
  return status;
}
void cuFileHandleDeregister(void* handle) {
  pthread_mutex_lock(&mutex);
  if (fcntl(((Handle*)handle)->descriptor, F_GETFL) < 0) ++misuses; /* closed before */
  free(handle);
  --files;
  pthread_mutex_unlock(&mutex);
}
Status cuFileBufRegister(const void* base, size_t nbytes, int flags) {
  pthread_mutex_lock(&mutex);
  Status status = {(int)settings[BUFFER], 0};
  if (!status.error) {
    if (buffers || flags || (size_t)base % 4096) ++misuses;
    buffer_base = base;
    buffer_nbytes = nbytes;
    ++buffers;
  }
  pthread_mutex_unlock(&mutex);
  return status;
}
Status cuFileBufDeregister(const void* base) {
  pthread_mutex_lock(&mutex);
  if (base != buffer_base) ++misuses;
  --buffers;
  pthread_mutex_unlock(&mutex);
  return done;
}

ssize_t cuFileRead(void* handle, void* base, size_t nbytes, off_t offset, off_t at) {
  pthread_mutex_lock(&mutex);
  ++reads;
  if (base != buffer_base || at < 0 || (size_t)at + nbytes > buffer_nbytes || nbytes % 4096 || offset % 4096) ++misuses;
  const int is_short = takes(SHORT), is_refused = takes(REFUSED), is_misaligned = takes(MISALIGNED), is_late = takes(LATE);
  const int is_changed = takes(CHANGED), is_half = takes(HALF);
  if (is_late) {
    ++held;
    while (settings[LATE] >= 0) pthread_cond_wait(&changed, &mutex); /* until fake_set("late", -1) */
    --held;
  }
  pthread_mutex_unlock(&mutex);
  if (is_refused) return -5008;
  if (is_misaligned) return errno = EINVAL, -1;
  char* target = (char*)base + at;
  const size_t wanted = is_short || is_half ? nbytes / 2 / 4096 * 4096 : nbytes;
  for (size_t moved = 0; moved < wanted;) {
    const ssize_t got = pread(((Handle*)handle)->descriptor, target + moved, wanted - moved, offset + (off_t)moved);
    if (got <= 0) return got < 0 ? -1 : (ssize_t)moved;
    moved += (size_t)got;
  }
  if (is_changed) target[nbytes / 2] ^= 1;
  return is_half ? (ssize_t)nbytes : (ssize_t)wanted; /* half: it says that all came */
}

/* What the GPU's module does for a reader's threads (csrc/io/device_calls.h), bit by bit. */
static int enter(int device) {
  (void)device;
  pthread_mutex_lock(&mutex);
  const int error = (int)settings[ENTER];
  pthread_mutex_unlock(&mutex);
  return error;
}
static int checksums(const void* data, size_t nbytes, uint32_t* sums) {
  pthread_mutex_lock(&mutex);
  const int error = (int)settings[DEVICE];
  pthread_mutex_unlock(&mutex);
  if (error) return error;
  const unsigned char* bytes = data;
  for (size_t at = 0; at < nbytes; at += 65536) {
    uint32_t value = ~0u;
    for (size_t i = at; i < nbytes && i < at + 65536; ++i) {
      value ^= bytes[i];
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0);
    }
    sums[at / 65536] = ~value;
  }
  return 0;
}
static int copy_out(void* host, const void* data, size_t nbytes) {
  pthread_mutex_lock(&mutex);
  const int error = (int)settings[DEVICE];
  copied += (long)nbytes;
  pthread_mutex_unlock(&mutex);
  if (!error) memcpy(host, data, nbytes);
  return error;
}
static const struct {
  int (*enter)(int);
  int (*checksums)(const void*, size_t, uint32_t*);
  int (*copy_out)(void*, const void*, size_t);
} calls = {enter, checksums, NULL}, driver_calls = {enter, NULL, copy_out};
const void* fake_calls(void) { return &calls; }
const void* fake_driver_calls(void) { return &driver_calls; }
