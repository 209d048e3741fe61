// The Python module `_cuda`: converts, and nothing else. Layouts and runs are `_C`'s, which must be
// imported before.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "cuda/kernels.h"

namespace py = pybind11;
using namespace infinity;

namespace {

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const UsageError& error) {
      PyErr_SetString(py::module_::import("infinity.errors").attr("UsageError").ptr(),
                      error.what());
    }
  });

  m.def(
      "step",
      [](const Layout& layout, std::uintptr_t weight, std::uintptr_t master, std::uintptr_t grad,
#define INFINITY_PARAMETER(name, role, of_state) std::uintptr_t name,
#define INFINITY_SCALE_PARAMETER(name, role, of_state) std::uintptr_t name##_scale,
         INFINITY_MOMENTS(INFINITY_PARAMETER) INFINITY_SCALED_MOMENTS(INFINITY_SCALE_PARAMETER)
#undef INFINITY_PARAMETER
#undef INFINITY_SCALE_PARAMETER
             const std::vector<Run>& runs,
         std::uintptr_t stream) {
        Arrays arrays;
        arrays.weight = at<void>(weight);
        arrays.master = at<void>(master);
        arrays.grad = at<const void>(grad);
#define INFINITY_SET(name, role, of_state) arrays.name = at<void>(name);
#define INFINITY_SET_SCALE(name, role, of_state) \
  arrays.name##_scale = at<std::uint8_t>(name##_scale);
        INFINITY_MOMENTS(INFINITY_SET)
        INFINITY_SCALED_MOMENTS(INFINITY_SET_SCALE)
#undef INFINITY_SET
#undef INFINITY_SET_SCALE
        cuda::step(layout, arrays, runs, at<void>(stream));
      },
#define INFINITY_ARGUMENT(name, role, of_state) py::arg(#name) = 0,
#define INFINITY_SCALE_ARGUMENT(name, role, of_state) py::arg(#name "_scale") = 0,
      py::arg("layout"), py::kw_only(), py::arg("weight"), py::arg("master") = 0, py::arg("grad"),
      INFINITY_MOMENTS(INFINITY_ARGUMENT) INFINITY_SCALED_MOMENTS(INFINITY_SCALE_ARGUMENT)
#undef INFINITY_ARGUMENT
#undef INFINITY_SCALE_ARGUMENT
          py::arg("runs"),
      py::arg("stream") = 0);
  m.def(
      "scan",
      [](std::uintptr_t grad, DType grad_dtype, std::uintptr_t out, DType out_dtype,
         std::size_t count, std::uintptr_t sum, std::uintptr_t not_finite, std::uintptr_t workspace,
         std::uintptr_t stream) {
        cuda::scan(at<const void>(grad), grad_dtype, at<void>(out), out_dtype, count,
                   at<double>(sum), at<float>(not_finite), at<void>(workspace), at<void>(stream));
      },
      py::kw_only(), py::arg("grad"), py::arg("grad_dtype"), py::arg("out") = 0,
      py::arg("out_dtype"), py::arg("count"), py::arg("sum"), py::arg("not_finite"),
      py::arg("workspace"), py::arg("stream") = 0);
  m.def("scan_workspace_nbytes", &cuda::scan_workspace_nbytes, py::arg("count"));
  // for _C's DirectReader
  m.def("calls", [] { return reinterpret_cast<std::uintptr_t>(&cuda::calls()); });
  m.def(
      "checksums",
      [](std::uintptr_t data, std::size_t nbytes) {
        std::vector<std::uint32_t> sums(checksum_count(nbytes));
        const int error = cuda::calls().checksums(at<const void>(data), nbytes, sums.data());
        INFINITY_CHECK(error == 0, "the checksums' kernel failed: CUDA error ", error);
        return sums;
      },
      py::arg("data"), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>());
  m.attr("targets") = INFINITY_CUDA_TARGETS;  // as setup.py has them: "sm_80 sm_90 compute_90"
  m.def("device", [] {
    std::string refusal;
    const cuda::Device found = cuda::device(&refusal);
    py::dict told;
    if (!refusal.empty()) {
      told["refusal"] = refusal;
    } else {
      told["name"] = found.name;
      told["capability"] = py::make_tuple(found.major, found.minor);
      told["processors"] = found.processors;
      told["total_nbytes"] = found.total_nbytes;
      told["free_nbytes"] = found.free_nbytes;
    }
    return told;
  });
}
