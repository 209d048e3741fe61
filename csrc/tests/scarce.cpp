// The operators new and delete of the tests' program: those of the library, but for memory that
// runs out when a test wants it to.
#include "tests/scarce.h"

#include <atomic>
#include <cstdlib>

namespace infinity::tests {
namespace {

std::atomic<bool> counting{false}, of_all_threads{false}, all_later{false}, has_failed{false};
std::atomic<long> left{0};
thread_local bool is_callers = false;

bool fails() {
  if (!counting || !(of_all_threads || is_callers)) return false;
  const long before = left--;
  if (before > 0 || (before < 0 && !all_later)) return false;
  has_failed = true;
  return true;
}

void* memory_of(std::size_t nbytes, std::size_t alignment) noexcept {
  if (fails()) return nullptr;
  if (nbytes == 0) nbytes = 1;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(nbytes);
  return std::aligned_alloc(alignment, (nbytes + alignment - 1) / alignment * alignment);
}

void* memory_or_throw(std::size_t nbytes, std::size_t alignment = 0) {
  if (void* const memory = memory_of(nbytes, alignment)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void Shortage::begin() {
  left = static_cast<long>(first_);
  of_all_threads = others_;
  all_later = lasting_;
  has_failed = false;
  is_callers = true;
  counting = true;
}

void Shortage::end() {
  counting = false;
  is_callers = false;
  ran_out_ = has_failed;
}

}  // namespace infinity::tests

using infinity::tests::memory_of;
using infinity::tests::memory_or_throw;

void* operator new(std::size_t nbytes) { return memory_or_throw(nbytes); }
void* operator new[](std::size_t nbytes) { return memory_or_throw(nbytes); }
void* operator new(std::size_t nbytes, std::align_val_t to) {
  return memory_or_throw(nbytes, static_cast<std::size_t>(to));
}
void* operator new[](std::size_t nbytes, std::align_val_t to) {
  return memory_or_throw(nbytes, static_cast<std::size_t>(to));
}
void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept {
  return memory_of(nbytes, 0);
}
void* operator new[](std::size_t nbytes, const std::nothrow_t&) noexcept {
  return memory_of(nbytes, 0);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete[](void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete[](void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, std::size_t,
                                               std::align_val_t) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete[](void* memory, std::size_t,
                                                 std::align_val_t) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete[](void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}

namespace infinity::tests {
namespace {

TEST(scarce, every_allocation_of_a_call_fails_in_its_turn) {
  // Three allocations of the caller's: the shortages are four, and the last does not strike. Those
  // of another thread count only if they are meant to.
  int calls = 0, failed = 0;
  each_shortage([&](Shortage& shortage) {
    ++calls;
    failed += !shortage.survived([] {
      for (int i = 0; i < 3; ++i) operator delete(operator new(8));
    });
  });
  CHECK(calls == 4 * 4 && failed == 4 * 3, calls, ", ", failed);
}

}  // namespace
}  // namespace infinity::tests
