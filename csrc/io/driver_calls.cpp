#include <string>

#include "io/device_calls.h"
#include "memory/driver.h"

namespace infinity {
namespace {

Driver& driver() {
  std::string refusal;
  return *Driver::find(&refusal);  // it was found when the calls were handed out, and stays
}

int enter(int device) { return driver().enter(device); }
int copy_out(void* host, const void* data, std::size_t nbytes) {
  return driver().copy_out(host, data, nbytes);
}

constexpr DeviceCalls kCalls{&enter, nullptr, &copy_out};

}  // namespace

const DeviceCalls* driver_calls() {
  std::string refusal;
  return Driver::find(&refusal) ? &kCalls : nullptr;
}

}  // namespace infinity
