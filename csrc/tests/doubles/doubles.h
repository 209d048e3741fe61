// Doubles: backends that stand in for disks, in tests and benchmarks.
//
//   faulty     any backend, with seeded faults between it and the engine
//   modelled   any backend, with every result held back until a disk of a given rate would have it
//   instant    reports every piece as moved, and moves nothing
//
// They are compiled into the C++ tests and into the module of tests/support/doubles. No wheel and
// no source distribution has them.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/backend.h"

namespace infinity::doubles {

// Faults, drawn from a seed and the piece's number: a run can be repeated. Probabilities are per
// piece.
struct FaultPlan {
  std::uint64_t seed = 0;
  double short_transfer = 0;  // fewer bytes than asked for are moved
  double delay = 0;  // the result comes `delay_seconds` late
  double delay_seconds = 0.001;
  double reorder = 0;  // the result is held back until a later one comes
  double eio = 0;
  double enospc = 0;  // of writes
  double read_only = 0;  // of writes: the file system was remounted after an error
  double lost_write = 0;  // reported as done, never performed
  double torn_write = 0;  // reported as done, of which only the first part is performed
  double bit_flip = 0;  // one bit of what was read
  double hang = 0;  // no result ever comes
  std::int64_t first_piece = 0;  // pieces before this one have no fault
  std::int64_t file = -1;  // only pieces of this file are counted and have faults; -1: all
};

// Turns the faults of all backends of one layer off and on, and counts those that struck.
struct FaultSwitch {
  std::atomic<bool> on{true};
  std::atomic<std::int64_t> short_transfer{0}, delay{0}, reorder{0}, eio{0}, enospc{0},
      read_only{0}, lost_write{0}, torn_write{0}, bit_flip{0}, hang{0};

  std::map<std::string, std::int64_t> struck() const {
    return {{"short_transfer", short_transfer},
            {"delay", delay},
            {"reorder", reorder},
            {"eio", eio},
            {"enospc", enospc},
            {"read_only", read_only},
            {"lost_write", lost_write},
            {"torn_write", torn_write},
            {"bit_flip", bit_flip},
            {"hang", hang}};
  }
};

// A modelled disk: files under `folder` move at `rate` bytes per second.
struct DiskModel {
  std::string folder;
  double rate = 0;
};

// Names the modelled disk that `path` is on, or returns an empty string.
std::string modelled_device(const std::vector<DiskModel>& models, const std::string& path);

std::unique_ptr<Backend> make_instant_backend();

// `clocks` is a file that all processes with the same disks map: they share the rates. Throws
// UsageError and StorageError.
std::unique_ptr<Backend> make_modelled_backend(std::unique_ptr<Backend> inner,
                                               std::vector<DiskModel> models,
                                               const std::string& clocks);

std::unique_ptr<Backend> make_faulty_backend(
    std::unique_ptr<Backend> inner, FaultPlan plan,
    std::shared_ptr<FaultSwitch> its = std::make_shared<FaultSwitch>());

// What stands between an engine and its backend: the instant backend or the real one, below the
// models, below the faults.
struct Doubles : BackendLayer {
  bool instant = false;
  std::vector<DiskModel> models;
  std::string clocks;
  std::optional<FaultPlan> faults;
  std::shared_ptr<FaultSwitch> its = std::make_shared<FaultSwitch>();

  std::unique_ptr<Backend> make(
      const std::function<std::unique_ptr<Backend>()>& real) const override {
    std::unique_ptr<Backend> backend = instant ? make_instant_backend() : real();
    if (!models.empty()) backend = make_modelled_backend(std::move(backend), models, clocks);
    if (faults) backend = make_faulty_backend(std::move(backend), *faults, its);
    return backend;
  }
  std::string device_of(const std::string& path) const override {
    return modelled_device(models, path);
  }
};

}  // namespace infinity::doubles
