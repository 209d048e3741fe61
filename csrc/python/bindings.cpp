// Bindings: convert, release the GIL, nothing else. Addresses come in as integers;
// infinity/native.py has checked dtype, contiguity and alignment.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>

#include "optim/kernel.h"
#include "bench/traffic.h"
#include "base/check.h"
#include "base/crc32c.h"
#include "io/direct.h"
#include "io/engine.h"
#include "io/extent.h"
#include "io/shared_row.h"
#include "io/volume.h"
#include "memory/account.h"
#include "memory/driver.h"
#include "memory/pool.h"
#include "memory/region.h"
#include "python/scopes.h"
#include "update/updater.h"

namespace py = pybind11;
using namespace infinity;

namespace {

using Address = std::uintptr_t;

std::byte* at(Address address) { return reinterpret_cast<std::byte*>(address); }
Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

void raise_python(const char* name, const py::tuple& arguments) {
  const py::object type = py::module_::import("infinity.errors").attr(name);
  PyErr_SetObject(type.ptr(), type(*arguments).ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const StorageError& error) {
    const py::object path = error.path.empty() ? py::object(py::none()) : py::str(error.path);
    raise_python("StorageError", py::make_tuple(error.error_number, error.what(), path));
  } catch (const CorruptionError& error) {
    raise_python("CorruptionError", py::make_tuple(error.what()));
  } catch (const UsageError& error) {
    raise_python("UsageError", py::make_tuple(error.what()));
  } catch (const CheckFailure& error) {
    raise_python("InternalError", py::make_tuple(error.what()));
  }
}

// A forked child has a copy of the object without its threads: it is never destroyed there, since a
// lock or a condition that a thread held or waited on at the fork stays so. Destruction waits for
// threads, and one of those may wait for Python: the lock of the interpreter is not held meanwhile.
template <class Object>
std::shared_ptr<Object> kept_in_children(Object* object) {
  return {object, [](Object* mine) {
            if (!mine->is_ours()) return;
            if (!Py_IsInitialized() || !PyGILState_Check()) {
              delete mine;
              return;
            }
            py::gil_scoped_release release;
            delete mine;
          }};
}

// Waits without the GIL, looking up now and then so that Ctrl-C works during a long wait.
void wait_for_ticket(const Ticket& ticket) {
  for (;;) {
    {
      py::gil_scoped_release release;
      if (ticket.wait_for(0.1)) break;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  ticket.wait();
}

// The transfer keeps `lease` until it is over, whatever becomes of the ticket.
std::shared_ptr<void> held(const Lease* lease) { return lease ? lease->hold() : nullptr; }

TicketPtr read(IoEngine& engine, const Extent& extent, std::size_t offset, Address address,
               std::size_t nbytes, const TicketPtr& after, const Lease* lease, bool checksum) {
  const std::shared_ptr<void> memory = held(lease);  // before anybody else can release it
  py::gil_scoped_release release;
  return extent.read(engine, offset, {at(address), nbytes}, after, memory, checksum);
}

// The bytes must be there already.
TicketPtr write(IoEngine& engine, Extent& extent, std::size_t offset, Address address,
                std::size_t nbytes, bool checksum, const Lease* lease) {
  const std::shared_ptr<void> memory = held(lease);
  py::gil_scoped_release release;
  return extent.write(engine, offset, {at(address), nbytes}, memory, checksum);
}

// Waits for memory that a transfer holds, looking up as above. False when no transfer holds any.
bool wait_for_transfer(PinnedPool& pool) {
  bool any;
  {
    py::gil_scoped_release release;
    any = pool.wait_for_transfer(0.1);
  }
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  return any;
}

template <class Held>
py::class_<Held, std::shared_ptr<Held>> shared_class(py::module_& module, const char* name) {
  return py::class_<Held, std::shared_ptr<Held>>(module, name);
}

void bind_memory(py::module_& m) {
  m.def("cuda_driver", [] {
    std::string refusal;
    const Driver* driver = Driver::find(&refusal);
    return py::make_tuple(driver ? driver->version() : 0, refusal);
  });
  m.def("trim_heap", &trim_heap, py::call_guard<py::gil_scoped_release>());
  m.def("map_large_buffers", &map_large_buffers, py::arg("nbytes"));
  py::class_<Region, std::shared_ptr<Region>>(m, "Region", py::buffer_protocol())
      .def(py::init([](std::size_t nbytes, bool huge_pages, int touch_threads) {
             py::gil_scoped_release release;
             return std::make_shared<Region>(nbytes, huge_pages, touch_threads);
           }),
           py::arg("nbytes"), py::arg("huge_pages") = true, py::arg("touch_threads") = 1)
      .def_property_readonly("address", [](const Region& r) { return address_of(r.data()); })
      .def_property_readonly("nbytes", &Region::nbytes)
      .def_property_readonly("huge_pages", &Region::huge_pages)
      .def("pin", &Region::pin, py::arg("device") = 0, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("pinned", &Region::pinned)
      .def("discard", &Region::discard, py::call_guard<py::gil_scoped_release>())
      .def(
          "populate", [](Region& region, int threads) { region.populate(threads); },
          py::arg("threads"), py::call_guard<py::gil_scoped_release>())
      .def_buffer([](Region& r) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(r.data()),
                               static_cast<py::ssize_t>(r.nbytes()));
      });
  py::class_<Lease>(m, "Lease")
      .def_property_readonly("address", [](const Lease& l) { return address_of(l.span().data); })
      .def_property_readonly("nbytes", [](const Lease& l) { return l.span().nbytes; })
      .def("release", &Lease::release);
  py::class_<Pages, std::shared_ptr<Pages>>(m, "Pages")
      .def(py::init([](std::vector<std::shared_ptr<Region>> regions, int threads) {
             return kept_in_children(new Pages(std::move(regions), threads));
           }),
           py::arg("regions"), py::arg("threads"))
      .def_property_readonly("done", &Pages::done)
      .def("wait", &Pages::wait, py::call_guard<py::gil_scoped_release>())
      .def("stop", &Pages::stop, py::call_guard<py::gil_scoped_release>());
  shared_class<Charge>(m, "Charge")
      .def_property_readonly("nbytes", &Charge::nbytes)
      .def("release", &Charge::release);
  shared_class<Account>(m, "Account")
      .def(py::init<>())
      .def("charge", &Account::charge, py::arg("nbytes"), py::arg("passing") = false)
      .def("forget_passing", &Account::forget_passing)
      .def_property_readonly("charged_nbytes", &Account::charged)
      .def_property_readonly("peak_nbytes", &Account::peak)
      .def_readwrite("planned_nbytes", &Account::planned)
      .def_readwrite("budget_nbytes", &Account::budget);
  shared_class<PinnedPool>(m, "PinnedPool")
      .def(py::init<std::shared_ptr<Region>>(), py::arg("region"))
      .def(
          "try_lease",
          [](PinnedPool& pool, std::size_t nbytes) -> py::object {
            Lease lease = pool.try_lease(nbytes);
            return lease ? py::cast(std::move(lease)) : py::none();
          },
          py::arg("nbytes"))
      .def("wait_for_transfer", &wait_for_transfer)
      .def("take_back_all", &PinnedPool::take_back_all)
      .def_property_readonly("region", &PinnedPool::region)
      .def_property_readonly("capacity_nbytes", &PinnedPool::capacity_nbytes)
      .def_property_readonly("leased_nbytes", &PinnedPool::leased_nbytes)
      .def_property_readonly("peak_nbytes", &PinnedPool::peak_nbytes);
}

void bind_io(py::module_& m) {
  py::enum_<Op>(m, "Op").value("READ", Op::kRead).value("WRITE", Op::kWrite);
  shared_class<BackendLayer>(m, "BackendLayer");  // bound here for modules of test doubles
  shared_class<Ticket>(m, "Ticket")
      .def(py::init<std::size_t>(), py::arg("parts"))  // of work that is not the core's
      .def(
          "part_done", [](Ticket& ticket) { ticket.part_done(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "part_failed",
          [](Ticket& ticket, const std::string& why) {
            ticket.part_done(std::make_exception_ptr(std::runtime_error(why)));
          },
          py::arg("why"), py::call_guard<py::gil_scoped_release>())
      .def("wait", &wait_for_ticket)
      .def("wait_for", &Ticket::wait_for, py::arg("seconds"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("done", &Ticket::done)
      .def_property_readonly("times", &Ticket::times);
  m.def("joined", &joined, py::arg("tickets"), py::call_guard<py::gil_scoped_release>());
  shared_class<Volume>(m, "Volume")
      .def(py::init<>())
      .def("lay_out", &Volume::lay_out, py::arg("stripe_nbytes"), py::arg("counts"),
           py::arg("skipped"), py::arg("nbytes"))
      .def("set_files", &Volume::set_files, py::arg("files"))
      .def_property_readonly("files", &Volume::files)
      .def(
          "place",
          [](const Volume& volume, std::uint64_t at, std::size_t nbytes) {
            const Volume::Place place = volume.place(at, nbytes);
            return py::make_tuple(place.file, place.offset, place.nbytes);
          },
          py::arg("at"), py::arg("nbytes"));
  shared_class<SumCache>(m, "SumCache").def(py::init<std::size_t>(), py::arg("pages"));
  m.def("sum_table_nbytes", &SumTable::nbytes_of, py::arg("nbytes"));
  shared_class<Extent>(m, "Extent")
      .def_static(
          "in_memory",
          [](Address address, std::size_t nbytes, std::shared_ptr<Region> owner) {
            return std::make_shared<Extent>(
                Extent::in_memory({at(address), nbytes}, std::move(owner)));
          },
          py::arg("address"), py::arg("nbytes"), py::arg("owner") = nullptr)
      .def_static(
          "in_file",
          [](int file, std::uint64_t offset, std::size_t nbytes) {
            return std::make_shared<Extent>(Extent::in_file(file, offset, nbytes));
          },
          py::arg("file"), py::arg("offset"), py::arg("nbytes"))
      .def_static(
          "unknown",
          [](int file, std::uint64_t offset, std::size_t nbytes) {
            return std::make_shared<Extent>(Extent::unknown(file, offset, nbytes));
          },
          py::arg("file"), py::arg("offset"), py::arg("nbytes"))
      .def_static(
          "in_volume",
          [](std::shared_ptr<Volume> volume, std::uint64_t offset, std::size_t nbytes,
             const std::shared_ptr<SumCache>& sums) {
            return std::make_shared<Extent>(
                Extent::in_volume(std::move(volume), offset, nbytes, sums));
          },
          py::arg("volume"), py::arg("offset"), py::arg("nbytes"), py::arg("sums") = nullptr)
      .def(
          "part",
          [](const Extent& extent, std::size_t offset, std::size_t nbytes) {
            return std::make_shared<Extent>(extent.part(offset, nbytes));
          },
          py::arg("offset"), py::arg("nbytes"))
      .def("writes_under_way", &Extent::writes_under_way)
      .def("checksum", &Extent::checksum, py::arg("nbytes"),
           py::call_guard<py::gil_scoped_release>())
      .def_property("version", &Extent::version, &Extent::set_version)
      .def_property_readonly("nbytes", &Extent::nbytes)
      .def_property_readonly("offset", &Extent::offset)
      .def_property_readonly("address", [](const Extent& e) { return address_of(e.memory()); })
      .def_property_readonly("is_file", &Extent::is_file);
  shared_class<IoEngine>(m, "IoEngine")
      .def(py::init([](std::string kind, unsigned depth, std::size_t block_nbytes, int threads,
                       double timeout_seconds, int work_threads, std::size_t max_pieces,
                       std::shared_ptr<BackendLayer> layer) {
             IoOptions options;
             options.kind = std::move(kind);
             options.depth = depth;
             options.block_nbytes = block_nbytes;
             options.threads = threads;
             options.timeout_seconds = timeout_seconds;
             options.work_threads = work_threads;
             options.max_pieces = max_pieces;
             options.layer = std::move(layer);
             return kept_in_children(new IoEngine(options));
           }),
           py::arg("kind") = "auto", py::arg("depth") = 64, py::arg("block_nbytes") = 1 << 20,
           py::arg("threads") = 8, py::arg("timeout_seconds") = 120.0, py::arg("work_threads") = 1,
           py::arg("max_pieces") = IoOptions{}.max_pieces, py::arg("layer") = nullptr)
      .def_property_readonly("backend", &IoEngine::backend_name)
      .def_property_readonly("hung", &IoEngine::hung)
      .def_property_readonly("notes", &IoEngine::notes)
      .def("create_file", &IoEngine::create_file, py::arg("path"), py::arg("nbytes"),
           py::call_guard<py::gil_scoped_release>())
      .def("shut_down", &IoEngine::shut_down, py::call_guard<py::gil_scoped_release>())
      .def("create_swap_file", &IoEngine::create_swap_file, py::arg("folder"), py::arg("nbytes"),
           py::call_guard<py::gil_scoped_release>())
      .def("drop_file", &IoEngine::drop_file, py::arg("file"), py::arg("behind") = true,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly(
          "open_files",
          py::cpp_function(&IoEngine::open_files, py::call_guard<py::gil_scoped_release>()))
      .def("open_file", &IoEngine::open_file, py::arg("path"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "device", [](const IoEngine& engine, int file) { return engine.file(file).device; },
          py::arg("file"))
      .def(
          "is_direct", [](const IoEngine& engine, int file) { return engine.file(file).direct; },
          py::arg("file"))
      .def(
          "register",
          [](IoEngine& engine, const std::vector<std::shared_ptr<Region>>& regions) {
            std::vector<Span> spans;
            for (const auto& region : regions) {
              INFINITY_REQUIRE(region, "an I/O engine registers regions");
              spans.push_back({region->data(), region->nbytes()});
            }
            const auto is_done = [&] {
              py::gil_scoped_release release;
              return engine.register_files_and_buffers(spans, {regions.begin(), regions.end()},
                                                       0.1);
            };
            while (!is_done())
              if (PyErr_CheckSignals() != 0) throw py::error_already_set();
          },
          py::arg("regions"))
      .def("read", &read, py::arg("extent"), py::arg("offset"), py::arg("address"),
           py::arg("nbytes"), py::arg("after") = nullptr, py::arg("lease") = nullptr,
           py::arg("checksum") = true)
      .def("write", &write, py::arg("extent"), py::arg("offset"), py::arg("address"),
           py::arg("nbytes"), py::arg("checksum") = true, py::arg("lease") = nullptr)
      .def("cancel", &IoEngine::cancel, py::arg("ticket"), py::call_guard<py::gil_scoped_release>())
      .def(
          "verify",
          [](IoEngine& engine, const Extent& extent, std::size_t offset, Address address,
             std::size_t nbytes) { extent.verify(offset, {at(address), nbytes}, engine); },
          py::arg("extent"), py::arg("offset"), py::arg("address"), py::arg("nbytes"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "nbytes", [](const IoEngine& engine, Op op) { return engine.totals(op).nbytes; },
          py::arg("op"))
      .def(
          "busy_seconds",
          [](const IoEngine& engine, Op op) { return engine.totals(op).busy_seconds; },
          py::arg("op"));
}

void bind_direct(py::module_& m) {
  m.def("cufile", [] {
    std::string refusal;
    const std::string version = cufile_version(&refusal);
    return py::make_tuple(version, refusal);
  });
  m.def("driver_calls", [] { return address_of(driver_calls()); });
  shared_class<Landing>(m, "Landing")
      .def("wait", [](const Landing& landing) { wait_for_ticket(*landing.ticket()); })
      .def_property_readonly("done",
                             [](const Landing& landing) { return landing.ticket()->done(); })
      .def_property_readonly("times",
                             [](const Landing& landing) { return landing.ticket()->times(); })
      .def_property_readonly("on_device", &Landing::on_device);
  shared_class<Road>(m, "Road").def_property_readonly("name", &Road::name);
  m.def(
      "make_cufile_road",
      [](Address address, std::size_t nbytes) {
        std::string refusal;
        auto road = make_cufile_road({at(address), nbytes}, &refusal);
        return py::make_tuple(road, refusal);
      },
      py::arg("address"), py::arg("nbytes"));
  shared_class<DirectReader>(m, "DirectReader")
      .def(py::init([](std::shared_ptr<IoEngine> engine, std::shared_ptr<Road> road, Address calls,
                       int device, int threads, double late_seconds, double hung_seconds,
                       bool checksums, int sampled) {
             DirectOptions options;
             options.device = device;
             options.threads = threads;
             options.late_seconds = late_seconds;
             options.hung_seconds = hung_seconds;
             options.checksums = checksums;
             options.sampled = sampled;
             const DeviceCalls made =
                 calls ? *reinterpret_cast<const DeviceCalls*>(calls) : DeviceCalls{};
             return kept_in_children(
                 new DirectReader(std::move(engine), std::move(road), made, options));
           }),
           py::arg("engine"), py::arg("road"), py::kw_only(), py::arg("calls"),
           py::arg("device") = 0, py::arg("threads") = 8, py::arg("late_seconds") = 10.0,
           py::arg("hung_seconds") = 120.0, py::arg("checksums") = true, py::arg("sampled") = 0)
      .def(
          "read",
          [](DirectReader& reader, const std::shared_ptr<Extent>& extent, std::size_t offset,
             Address host, Address device, std::size_t nbytes, const TicketPtr& after,
             const Lease* lease) {
            const std::shared_ptr<void> memory = held(lease);
            py::gil_scoped_release release;
            return reader.read(extent, offset, {at(host), nbytes}, at(device), after, memory);
          },
          py::arg("extent"), py::arg("offset"), py::arg("host"), py::arg("device"),
          py::arg("nbytes"), py::arg("after") = nullptr, py::arg("lease") = nullptr)
      .def("cancel", &DirectReader::cancel, py::arg("landing"),
           py::call_guard<py::gil_scoped_release>())
      .def("shut_down", &DirectReader::shut_down, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("nbytes", &DirectReader::nbytes)
      .def_property_readonly("refused",
                             [](const DirectReader& reader) {
                               std::map<std::string, std::pair<std::uint64_t, std::string>> told;
                               for (const auto& [word, refusals] : reader.refused())
                                 told[word] = {refusals.count, refusals.first};
                               return told;
                             })
      .def_property_readonly("stuck", &DirectReader::stuck)
      .def_property_readonly("hung", &DirectReader::hung);
}

void bind_shared_row(py::module_& m) {
  using Named = std::tuple<int, int, std::uint64_t, std::uint64_t>;
  py::class_<SharedRow, std::shared_ptr<SharedRow>>(m, "SharedRow")
      .def(py::init([](int threads) { return kept_in_children(new SharedRow(threads)); }),
           py::arg("threads"))
      .def(
          "allocate",
          [](SharedRow& row, std::size_t nbytes, bool huge_pages, int touch_threads) {
            py::gil_scoped_release release;
            return row.allocate(nbytes, huge_pages, touch_threads);
          },
          py::arg("nbytes"), py::arg("huge_pages") = true, py::arg("touch_threads") = 1)
      .def("self",
           [](const SharedRow& row) -> Named {
             const SharedRow::Peer peer = row.self();
             return {peer.process, peer.file, peer.token, peer.nbytes};
           })
      .def(
          "connect",
          [](SharedRow& row, const std::vector<Named>& named, std::size_t place) {
            std::vector<SharedRow::Peer> peers;
            for (const auto& [process, file, token, nbytes] : named)
              peers.push_back({process, file, token, nbytes});
            py::gil_scoped_release release;
            row.connect(peers, place);
          },
          py::arg("peers"), py::arg("place"))
      .def("close_file", &SharedRow::close_file)
      .def("owns", &SharedRow::owns, py::arg("region"))
      .def("shares", &SharedRow::shares, py::arg("region"))
      .def(
          "gather",
          [](SharedRow& row, std::uint64_t what, Address home, std::size_t nbytes, Address whole,
             double patience_seconds) {
            py::gil_scoped_release release;
            return row.gather(what, at(home), nbytes, at(whole), patience_seconds);
          },
          py::arg("what"), py::arg("home"), py::arg("nbytes"), py::arg("whole"),
          py::arg("patience_seconds"))
      .def_property_readonly("begun", &SharedRow::begun)
      .def("under_way", &SharedRow::under_way)
      .def_readonly_static("NOBODYS", &SharedRow::kNobodys)
      .def("close", &SharedRow::close, py::call_guard<py::gil_scoped_release>());
}

void bind_adam(py::module_& m) {
  py::enum_<Rule>(m, "Rule")
#define INFINITY_VALUE(Name, NAME) .value(#NAME, Rule::k##Name)
      INFINITY_OFTEN_USED(INFINITY_VALUE) INFINITY_SELDOM_USED(INFINITY_VALUE);
#undef INFINITY_VALUE
  py::enum_<DType>(m, "DType")
      .value("FLOAT32", DType::kFloat32)
      .value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT16", DType::kFloat16)
      .value("INT8", DType::kInt8);
  py::enum_<Master>(m, "Master")
      .value("OWN", Master::kOwn)
      .value("SPLIT", Master::kSplit)
      .value("FLOAT32", Master::kFloat32);
  py::class_<Layout>(m, "Layout")
      .def(py::init([](Rule rule, DType weight, Master master, DType grad, DType moments) {
             return Layout{rule, weight, master, grad, moments};
           }),
           py::arg("rule"), py::arg("weight"), py::arg("master"), py::arg("grad"),
           py::arg("moments"))
      .def_readonly("rule", &Layout::rule);
  py::class_<Hyperparameters>(m, "Hyperparameters")
      .def(py::init<>())
      .def_readwrite("lr", &Hyperparameters::lr)
      .def_readwrite("beta1", &Hyperparameters::beta1)
      .def_readwrite("beta2", &Hyperparameters::beta2)
      .def_readwrite("eps", &Hyperparameters::eps)
      .def_readwrite("weight_decay", &Hyperparameters::weight_decay)
      .def_readwrite("momentum", &Hyperparameters::momentum)
      .def_readwrite("dampening", &Hyperparameters::dampening)
      .def_readwrite("lr_decay", &Hyperparameters::lr_decay)
      .def_readwrite("smallest", &Hyperparameters::smallest)
      .def_readwrite("largest", &Hyperparameters::largest)
      .def_readwrite("nesterov", &Hyperparameters::nesterov)
      .def_readwrite("maximize", &Hyperparameters::maximize)
      .def_readwrite("decoupled", &Hyperparameters::decoupled)
      .def_readwrite("amsgrad", &Hyperparameters::amsgrad)
      .def_readwrite("centered", &Hyperparameters::centered)
      .def_readwrite("fixed_decay", &Hyperparameters::fixed_decay)
      .def_readwrite("beta3", &Hyperparameters::beta3)
      .def_readwrite("alpha", &Hyperparameters::alpha)
      .def_readwrite("fresh", &Hyperparameters::fresh)
      .def_readwrite("momentum_decay", &Hyperparameters::momentum_decay)
      .def_readwrite("mu_product", &Hyperparameters::mu_product)
      .def_readwrite("lambd", &Hyperparameters::lambd)
      .def_readwrite("eta", &Hyperparameters::eta)
      .def_readwrite("mu", &Hyperparameters::mu)
      .def_readwrite("step", &Hyperparameters::step)
      .def_readwrite("grad_factors", &Hyperparameters::grad_factors);
  py::class_<Run>(m, "Run").def(
      py::init([](std::size_t begin, std::size_t end, Hyperparameters hyper,
                  std::vector<Hyperparameters> missed, bool has_gradient) {
        return Run{begin, end, std::move(hyper), std::move(missed), has_gradient};
      }),
      py::arg("begin"), py::arg("end"), py::arg("hyper"),
      py::arg("missed") = std::vector<Hyperparameters>{}, py::arg("has_gradient") = true);
  m.attr("MOMENT_BLOCK") = kMomentBlock;
#define INFINITY_STRING(name, role, of_state) #name,
  const std::vector<std::string> scaled{INFINITY_SCALED_MOMENTS(INFINITY_STRING)};
  const std::vector<std::string> every{INFINITY_MOMENTS(INFINITY_STRING)};
#undef INFINITY_STRING
  m.attr("MOMENTS") = py::tuple(py::cast(every));
  m.attr("SCALED_MOMENTS") = py::tuple(py::cast(scaled));
  m.def(
      "encode_moments",
      [](Address values, Address codes, Address scales, std::size_t count, bool sq) {
        encode_moments(reinterpret_cast<const float*>(values),
                       reinterpret_cast<std::uint8_t*>(codes),
                       reinterpret_cast<std::uint8_t*>(scales), count, sq);
      },
      py::arg("values"), py::arg("codes"), py::arg("scales"), py::arg("count"), py::arg("sq"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "decode_moments",
      [](Address codes, Address scales, Address values, std::size_t count, bool sq) {
        decode_moments(reinterpret_cast<const std::uint8_t*>(codes),
                       reinterpret_cast<const std::uint8_t*>(scales),
                       reinterpret_cast<float*>(values), count, sq);
      },
      py::arg("codes"), py::arg("scales"), py::arg("values"), py::arg("count"), py::arg("sq"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "move_streams",
      [](const std::vector<std::tuple<Address, std::size_t, bool, bool>>& given, std::size_t count,
         int thread_count) {
        std::vector<Stream> streams;
        for (const auto& [address, nbytes, read, written] : given)
          streams.push_back({at(address), nbytes, read, written});
        move_streams(streams, count, thread_count);
      },
      py::arg("streams"), py::arg("count"), py::arg("thread_count"),
      py::call_guard<py::gil_scoped_release>());
  m.attr("MAX_GRAD_FACTORS") = kMaxGradFactors;
  m.def("simd_unit", &simd_unit);
  m.def("simd_units", &simd_units);
  m.def(
      "split_master",
      [](Address master, Address weight, Address low, std::size_t count) {
        split_master(reinterpret_cast<const float*>(master),
                     reinterpret_cast<std::uint16_t*>(weight),
                     reinterpret_cast<std::uint16_t*>(low), count);
      },
      py::arg("master"), py::arg("weight"), py::arg("low"), py::arg("count"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "join_master",
      [](Address weight, Address low, Address master, std::size_t count) {
        join_master(reinterpret_cast<const std::uint16_t*>(weight),
                    reinterpret_cast<const std::uint16_t*>(low), reinterpret_cast<float*>(master),
                    count);
      },
      py::arg("weight"), py::arg("low"), py::arg("master"), py::arg("count"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "crc32c",
      [](Address address, std::size_t nbytes, std::uint32_t seed) {
        return crc32c(at(address), nbytes, seed);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("seed") = 0,
      py::call_guard<py::gil_scoped_release>());
  m.def("crc32c_before", &crc32c_before, py::arg("sum"), py::arg("nbytes"));
  m.attr("CHECKSUM_NBYTES") = kChecksumNbytes;
}

// The moments of an update or a shadow, as parameters of Python
#define INFINITY_PARAMETER(name, role, of_state) std::shared_ptr<Extent> name,
#define INFINITY_SCALE_PARAMETER(name, role, of_state) std::shared_ptr<Extent> name##_scale,
#define INFINITY_SET(name, role, of_state) INFINITY_OWNER.name = std::move(name);
#define INFINITY_SET_SCALE(name, role, of_state) \
  INFINITY_OWNER.name##_scale = std::move(name##_scale);
#define INFINITY_ARGUMENT(name, role, of_state) py::arg(#name) = nullptr,
#define INFINITY_SCALE_ARGUMENT(name, role, of_state) py::arg(#name "_scale") = nullptr,

void bind_update(py::module_& m) {
  py::class_<Shadow>(m, "Shadow")
      .def(py::init([](std::shared_ptr<Extent> weight,
                       INFINITY_MOMENTS(INFINITY_PARAMETER)
                           INFINITY_SCALED_MOMENTS(INFINITY_SCALE_PARAMETER) std::shared_ptr<Extent>
                               master) {
             Shadow shadow;
             shadow.weight = std::move(weight);
             shadow.master = std::move(master);
#define INFINITY_OWNER shadow
             INFINITY_MOMENTS(INFINITY_SET)
             INFINITY_SCALED_MOMENTS(INFINITY_SET_SCALE)
#undef INFINITY_OWNER
             return shadow;
           }),
           py::arg("weight") = nullptr,
           INFINITY_MOMENTS(INFINITY_ARGUMENT) INFINITY_SCALED_MOMENTS(INFINITY_SCALE_ARGUMENT)
               py::arg("master") = nullptr);
  shared_class<UnitUpdate>(m, "UnitUpdate")
      .def(py::init([](Layout layout, std::size_t count, std::shared_ptr<Extent> weight,
                       std::shared_ptr<Extent> master, std::shared_ptr<Extent> grad,
                       std::vector<Run> runs, std::uint64_t version, TicketPtr after,
                       INFINITY_MOMENTS(INFINITY_PARAMETER)
                           INFINITY_SCALED_MOMENTS(INFINITY_SCALE_PARAMETER) int label,
                       Shadow shadow) {
             UnitUpdate update;
             update.layout = layout;
             update.count = count;
             update.weight = std::move(weight);
             update.master = std::move(master);
             update.grad = std::move(grad);
#define INFINITY_OWNER update
             INFINITY_MOMENTS(INFINITY_SET)
             INFINITY_SCALED_MOMENTS(INFINITY_SET_SCALE)
#undef INFINITY_OWNER
             update.runs = std::move(runs);
             update.version = version;
             update.after = std::move(after);
             update.label = label;
             update.shadow = std::move(shadow);
             return update;
           }),
           py::arg("layout"), py::arg("count"), py::arg("weight"), py::arg("master"),
           py::arg("grad"), py::arg("runs"), py::arg("version"), py::arg("after") = nullptr,
           INFINITY_MOMENTS(INFINITY_ARGUMENT) INFINITY_SCALED_MOMENTS(INFINITY_SCALE_ARGUMENT)
               py::arg("label") = 0,
           py::arg("shadow") = Shadow{})
      .def_readonly("ticket", &UnitUpdate::ticket)
      .def_readwrite("asked", &UnitUpdate::asked);
  shared_class<Updater>(m, "Updater")
      .def(py::init([](std::shared_ptr<IoEngine> engine, Address address, std::size_t nbytes,
                       int slot_count, int thread_count, std::shared_ptr<Region> owner,
                       bool checksums, bool measured) {
             return kept_in_children(new Updater(std::move(engine), Span{at(address), nbytes},
                                                 slot_count, thread_count, std::move(owner),
                                                 checksums, measured));
           }),
           py::arg("engine"), py::arg("address"), py::arg("nbytes"), py::arg("slot_count"),
           py::arg("thread_count"), py::arg("owner") = nullptr, py::arg("checksums") = true,
           py::arg("measured") = false)
      .def("submit", &Updater::submit, py::arg("update"), py::call_guard<py::gil_scoped_release>())
      .def("submit_all", &Updater::submit_all, py::arg("updates"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("step_seconds",
                             [](const Updater& u) { return u.totals().step_seconds; })
      .def_property_readonly("wait_seconds",
                             [](const Updater& u) { return u.totals().wait_seconds; })
      .def("record_events", &Updater::record_events)
      .def("take_events",
           [](Updater& updater) {
             std::vector<std::tuple<std::string, int, int, double, double, double>> found;
             for (const UpdaterEvent& event : updater.take_events())
               found.emplace_back(event.kind, event.label, event.slot.value_or(-1), event.start,
                                  event.end, event.ready);
             return found;
           })
      .def_property_readonly("elements", [](const Updater& u) { return u.totals().elements; });
}

#undef INFINITY_PARAMETER
#undef INFINITY_SCALE_PARAMETER
#undef INFINITY_SET
#undef INFINITY_SET_SCALE
#undef INFINITY_ARGUMENT
#undef INFINITY_SCALE_ARGUMENT

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "Native core of Infinity: host memory, disk transfers, optimizer kernels. Used through "
      "infinity.native.";
  py::register_exception_translator(&translate);
  bind_memory(m);
  bind_io(m);
  bind_direct(m);
  bind_shared_row(m);
  bind_adam(m);
  bind_update(m);
  shared_class<Scopes>(m, "Scopes")
      .def(py::init<py::object, py::object>(), py::arg("push"), py::arg("pop"))
      .def("push_hooks", &Scopes::push_hooks, py::arg("pack"), py::arg("unpack"))
      .def("pop_hooks", &Scopes::pop_hooks, py::arg("count"))
      .def_property_readonly("hooks", &Scopes::hooks)
      .def_readonly("running", &Scopes::running)
      .def_property_readonly("running_here",
                             [](const Scopes& scopes) { return scopes.here().scopes; })
      .def_property_readonly("is_used_elsewhere", &Scopes::is_used_elsewhere)
      .def_property_readonly("threads", &Scopes::threads)
      .def_property_readonly("has_to_wait", &Scopes::has_to_wait)
      .def_readonly("changes", &Scopes::changes)
      .def_readwrite("interrupted", &Scopes::interrupted)
      .def(
          "task",
          [](const std::shared_ptr<Scopes>& scopes, const py::object& wait) {
            return std::make_shared<Task>(scopes, wait);
          },
          py::arg("wait") = py::none())
      .def(
          "scope",
          [](const std::shared_ptr<Scopes>& scopes, py::object pack, py::object unpack,
             py::object wait, py::object prepare) {
            return std::make_shared<Scope>(scopes, std::move(pack), std::move(unpack),
                                           std::move(wait), std::move(prepare));
          },
          py::arg("pack") = py::none(), py::arg("unpack") = py::none(),
          py::arg("wait") = py::none(), py::arg("prepare") = py::none());
  shared_class<Task>(m, "Task").def("__call__", [](const Task&) {});
  m.def("insist", &insist, py::arg("work"), py::arg("tries") = 4);
  shared_class<Scope>(m, "Scope")
      .def("__enter__", &Scope::enter)
      .def("__exit__", [](Scope& scope, const py::object& kind, const py::object&,
                          const py::object&) { scope.leave(kind); });
  m.def(
      "uring_refusal",
      [] {
        std::string why;
        make_uring_backend(8, why);
        return why;
      },
      "Why io_uring cannot be used here, or an empty string.");
}
