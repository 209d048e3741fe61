// What wheels are linked with so that they load on glibc 2.28: functions that gcc's C++ library and
// its headers use since, by those that were there. Found by name in each module before libc's.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#pragma GCC visibility push(hidden)

// 2.32: whether counts of shared_ptr need no atomic operations. They always have them.
char __libc_single_threaded = 0;

// 2.36: one random number for std::random_device.
uint32_t arc4random(void) {
  uint32_t value = 0;
  if (getentropy(&value, sizeof value) != 0) __builtin_trap();
  return value;
}

// 2.30: waits until a time of `clock`. libc's own, where it is: only by the wall clock does a wait
// change its length if the time of day is set meanwhile.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  typedef int Wait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  Wait* own = (Wait*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
  if (own) return own(condition, mutex, clock, until);
  struct timespec now, wall;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &wall);
  wall.tv_sec += until->tv_sec - now.tv_sec;
  wall.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (wall.tv_nsec < 0) wall.tv_sec -= 1, wall.tv_nsec += 1000000000;
  if (wall.tv_nsec >= 1000000000) wall.tv_sec += 1, wall.tv_nsec -= 1000000000;
  return pthread_cond_timedwait(condition, mutex, &wall);
}
