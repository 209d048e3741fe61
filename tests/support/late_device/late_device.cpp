// A device for torch that is late, as a GPU is, on a machine that has none: what the engine forgets
// to order shows as wrong bits, a SIGSEGV or a NaN, with the engine's own classes, threads and
// allocator, and torch's autograd.
//
// A job that raises ends the process: as with a GPU's kernel, no caller can get the error.
#include <functional>
#include <map>
#include <memory>
#include <string>

// Not torch/extension.h, with which the compiler needs half as long again.
#include <pybind11/functional.h>
#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace late {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device getDevice() const override { return named(current_device); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device;
    uncheckedSetDevice(device);
    return named(before);
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), current_stream[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index_of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(index_of(device), Streams::all().make(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const int device = next.device_index();
    const auto before = stream(device, current_stream[device]);
    current_stream[device] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream given) const override { return own(given); }
  bool queryStream(const c10::Stream& given) const override { return own(given)->idle(); }
  void synchronizeStream(const c10::Stream& given) const override { own(given)->synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Streams::all().synchronize(device < 0 ? current_device : device);
  }

  void record(void** event, const c10::Stream& given, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr;
    recorded(*event) = own(given)->mark();
  }
  void block(void* event, const c10::Stream& given) const override {
    if (event && recorded(event)) own(given)->wait_for(recorded(event));
  }
  bool queryEvent(void* event) const override {
    return !event || !recorded(event) || recorded(event)->done();
  }
  void synchronizeEvent(void* event) const override {
    if (!event || !recorded(event)) return;
    if (!recorded(event)->done()) counts.wait();
    recorded(event)->wait();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto passed = recorded(end)->wait() - recorded(begin)->wait();
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  // Autograd calls it for a gradient that a node of another stream uses.
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& given) const override {
    Memory::all().record(data.get(), own(given));
  }

 private:
  static c10::Device named(int device) { return {kType, static_cast<c10::DeviceIndex>(device)}; }
  static int index_of(c10::Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  static c10::Stream stream(int device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, named(device), id);
  }
  static Stream* own(const c10::Stream& given) {
    return Streams::all().at(given.device_index(), static_cast<int>(given.id()));
  }
  static EventPtr& recorded(void* event) { return *static_cast<EventPtr*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kType, &allocator);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current_device;
    current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* place) const override { return Registered::all().has(place, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    if (nbytes == 0) {
      impl->set_data_ptr_noswap(c10::DataPtr(nullptr, impl->device()));
      impl->set_nbytes(0);
      return;
    }
    const int device = std::max<int>(impl->device().index(), 0);
    OnDevice there(device);
    auto data = allocator.allocate(nbytes);
    if (const auto same = std::min(nbytes, impl->nbytes()); same && impl->data()) {
      auto& memory = Memory::all();
      stream_of(device)->put([to = memory.usable(data.get()), from = memory.usable(impl->data()),
                              same] { std::memcpy(to, from, same); });
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  // The host has to know the size of what they return
  for (const char* name : {"equal", "masked_select", "nonzero", "_unique2"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("resize_", resize);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", to_scalar);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("view", view);
  library.impl("record_stream", record_stream);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_copy_type);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

// Runs ``work`` of Python as a job of the calling thread's stream.
void put(int device, std::function<void()> work, double seconds) {
  auto kept = std::make_shared<std::function<void()>>(std::move(work));
  pybind11::gil_scoped_release released;
  stream_of(device)->put(
      [kept] {
        pybind11::gil_scoped_acquire held;
        (*kept)();
        *kept = nullptr;
      },
      seconds);
}

}  // namespace late

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace late;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::globalContext().lazyInitDevice(kType);  // else torch takes no memory for pinned
  module.def("set_waits", [](bool waits) { pace.waits = waits; });
  module.def("set_delays", [](int most_us, double share) {
    pace.most_us = most_us;
    pace.share = share;
  });
  module.def("set_rates", [](double link, double memory, double flops) {
    pace.memory = memory;
    pace.flops = flops;
    pace.link = link;
  });
  module.def("fail_in", [](long allocations) { Memory::all().fail_in = allocations; });
  module.def("register", [](std::uintptr_t place, std::size_t nbytes) {
    Registered::all().add(reinterpret_cast<void*>(place), nbytes);
  });
  module.def("unregister", [](std::uintptr_t place) {
    Registered::all().remove(reinterpret_cast<void*>(place));
  });
  module.def("usable", [](std::uintptr_t place) {
    return reinterpret_cast<std::uintptr_t>(Memory::all().usable(reinterpret_cast<void*>(place)));
  });
  module.def("put", &put, pybind11::arg("device"), pybind11::arg("work"),
             pybind11::arg("seconds") = 0.0);
  module.def("leave", [](std::size_t nbytes) { Memory::all().leave(nbytes); });
  module.def("free_nbytes", [] { return Memory::all().free_nbytes(); });
  module.def("live_nbytes", [] { return Memory::all().live_nbytes(); });
  module.def("peak_nbytes", [] { return Memory::all().peak_nbytes(); });
  module.def("reset_peak", [] { Memory::all().reset_peak(); });
  module.def("refuse_copies", [](bool refuses) { counts.refuses_copies = refuses; });
  module.def("counts", [] {
    auto& memory = Memory::all();
    return std::map<std::string, long>{{"jobs", counts.jobs},     {"host_waits", counts.host_waits},
                                       {"aborts", counts.aborts}, {"allocations", memory.asked},
                                       {"fresh", memory.fresh},   {"reused", memory.reused}};
  });
  define_backend(module);
}
