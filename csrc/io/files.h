// File: one file that an engine transfers to or from, and the calls that create, reserve and open
// it.
//
// Every function here is thread-safe: it touches nothing but its arguments and the file system. The
// returned File owns its descriptor through `open`; the descriptor closes with the last copy of
// `open`. Nothing is left open, and no created file keeps its name, when a function throws.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "io/open_file.h"

namespace infinity {

struct File {
  int descriptor = -1;  // of `open`; -1: dropped
  std::shared_ptr<OpenFile> open;  // null: dropped
  std::string path;
  bool direct = false;  // O_DIRECT is on
  std::uint64_t nbytes = 0;
  std::string device;  // the kernel's name for the disk that the file is on
  int queue = -1;  // of that device, index given by the engine
  bool hung = false;  // a transfer timed out: the engine starts no other one
};

// Creates `path` with mode 0600 and reserves `nbytes`, so that no later write can fail with ENOSPC.
// O_DIRECT is on if the file system has it. Throws StorageError, or UsageError unless `nbytes` is a
// positive multiple of 4096.
File create_named_file(const std::string& path, std::uint64_t nbytes);

// As create_named_file, but the file has no name: no other process can find, open or remove it, and
// its space is free when this process ends. Error messages name `folder`.
File create_unnamed_file(const std::string& folder, std::uint64_t nbytes);

// Opens the existing file `path`, read-only if its permissions or file system allow no more.
// O_DIRECT is on if the file system has it. Throws StorageError.
File open_existing_file(const std::string& path);

}  // namespace infinity
