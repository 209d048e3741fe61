// The Python module of the doubles. infinity._C has to be imported first: it binds BackendLayer.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/doubles/doubles.h"

namespace py = pybind11;
using namespace infinity;
using namespace infinity::doubles;

PYBIND11_MODULE(_native, m) {
  m.doc() = "Doubles of disks for tests and benchmarks: see csrc/tests/doubles.";
  py::module_::import("infinity._C");
  py::class_<FaultPlan>(m, "FaultPlan")
      .def(py::init<>())
      .def_readwrite("seed", &FaultPlan::seed)
      .def_readwrite("short_transfer", &FaultPlan::short_transfer)
      .def_readwrite("delay", &FaultPlan::delay)
      .def_readwrite("delay_seconds", &FaultPlan::delay_seconds)
      .def_readwrite("reorder", &FaultPlan::reorder)
      .def_readwrite("eio", &FaultPlan::eio)
      .def_readwrite("enospc", &FaultPlan::enospc)
      .def_readwrite("read_only", &FaultPlan::read_only)
      .def_readwrite("lost_write", &FaultPlan::lost_write)
      .def_readwrite("torn_write", &FaultPlan::torn_write)
      .def_readwrite("bit_flip", &FaultPlan::bit_flip)
      .def_readwrite("hang", &FaultPlan::hang)
      .def_readwrite("first_piece", &FaultPlan::first_piece)
      .def_readwrite("file", &FaultPlan::file);
  py::class_<Doubles, BackendLayer, std::shared_ptr<Doubles>>(m, "Doubles")
      .def(py::init([](const FaultPlan* faults,
                       const std::vector<std::pair<std::string, double>>& models,
                       std::string clocks, bool instant) {
             auto made = std::make_shared<Doubles>();
             if (faults) made->faults = *faults;
             for (const auto& [folder, rate] : models) made->models.push_back({folder, rate});
             made->clocks = std::move(clocks);
             made->instant = instant;
             return made;
           }),
           py::arg("faults") = nullptr,
           py::arg("models") = std::vector<std::pair<std::string, double>>{},
           py::arg("clocks") = "", py::arg("instant") = false)
      .def_property(
          "on", [](const Doubles& self) { return self.its->on.load(); },
          [](Doubles& self, bool on) { self.its->on = on; })
      .def("struck", [](const Doubles& self) { return self.its->struck(); });
}
