// The rounding mode of a thread. A new one inherits its maker's, and torch can be told to flush
// subnormals to zero (torch.set_flush_denormal): the optimizer's bits must not depend on that.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace infinity {

// Nearest, ties to even; subnormals kept.
inline void use_default_rounding() {
#if defined(__x86_64__)
  _mm_setcsr(0x1F80);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, xzr");
#endif
}

// The same for as long as it lives, on a thread that is not ours.
class DefaultRounding {
 public:
  DefaultRounding() {
#if defined(__x86_64__)
    before_ = _mm_getcsr();
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(before_));
#endif
    use_default_rounding();
  }
  ~DefaultRounding() {
#if defined(__x86_64__)
    _mm_setcsr(before_);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(before_));
#endif
  }
  DefaultRounding(const DefaultRounding&) = delete;
  DefaultRounding& operator=(const DefaultRounding&) = delete;

 private:
#if defined(__x86_64__)
  unsigned before_;
#elif defined(__aarch64__)
  unsigned long before_;
#endif
};

}  // namespace infinity
