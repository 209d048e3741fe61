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
      [](const Layout& layout, std::uintptr_t weight, std::uintptr_t master, std::uintptr_t exp_avg,
         std::uintptr_t exp_avg_sq, std::uintptr_t grad, std::uintptr_t exp_avg_scale,
         std::uintptr_t exp_avg_sq_scale, std::uintptr_t moment_3, const std::vector<Run>& runs,
         std::uintptr_t stream) {
        const Arrays arrays{at<void>(weight),
                            at<void>(master),
                            at<void>(exp_avg),
                            at<void>(exp_avg_sq),
                            at<const void>(grad),
                            at<std::uint8_t>(exp_avg_scale),
                            at<std::uint8_t>(exp_avg_sq_scale),
                            at<void>(moment_3)};
        cuda::step(layout, arrays, runs, at<void>(stream));
      },
      py::arg("layout"), py::kw_only(), py::arg("weight"), py::arg("master") = 0,
      py::arg("exp_avg") = 0, py::arg("exp_avg_sq") = 0, py::arg("grad"),
      py::arg("exp_avg_scale") = 0, py::arg("exp_avg_sq_scale") = 0, py::arg("moment_3") = 0,
      py::arg("runs"), py::arg("stream") = 0);
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
