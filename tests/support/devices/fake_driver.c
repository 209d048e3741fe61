/* A CUDA driver for tests: says what it was asked in the file that FAKE_CUDA_LOG names, and refuses what FAKE_CUDA names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refuses(const char* what) {
  const char* refused = getenv("FAKE_CUDA");
  return refused && !strcmp(refused, what);
}

static void say(const char* what, void* address, size_t nbytes) {
  FILE* log = fopen(getenv("FAKE_CUDA_LOG"), "a");
  fprintf(log, "%s %p %zu\n", what, address, nbytes);
  fclose(log);
}

static int depth = 0;

int cuInit(unsigned flags) { return flags || refuses("init") ? 100 : 0; }
int cuDriverGetVersion(int* version) { return *version = refuses("old") ? 11040 : 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = refuses("device") ? 0 : 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = &depth, device; }
int cuCtxPushCurrent_v2(void* context) { return depth += context == &depth, 0; }
int cuCtxPopCurrent_v2(void** context) { return --depth, *context = &depth, 0; }
int cuMemHostRegister_v2(void* address, size_t nbytes, unsigned flags) {
  if (refuses("memory")) return 2;
  if (refuses("mapped")) return 801;
  if (depth != 1 || flags != 1) return 1;
  say("register", address, nbytes);
  return 0;
}
int cuMemHostUnregister(void* address) {
  say("unregister", address, 0);
  return depth == 1 ? 0 : 1;
}
int cuStreamCreate(void** stream, unsigned flags) { return *stream = &depth, flags != 1 || refuses("stream") ? 1 : 0; }
int cuStreamDestroy_v2(void* stream) { return stream == &depth ? 0 : 1; }
int cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, size_t nbytes, void* stream) {
  if (depth != 1 || stream != &depth) return 1;
  memcpy(host, (const void*)device, nbytes);
  return 0;
}
int cuStreamSynchronize(void* stream) { return stream == &depth ? 0 : 1; }
int cuGetErrorString(int error, const char** text) { return *text = error == 2 ? "out of memory" : "refused", 0; }
