// Backend: collectives of the late device, as NCCL has them. Each is a job of a stream of its own,
// behind the compute before its launch; waiting for it orders the caller's stream, not the host.
//
// A wait with a limit blocks the host, and aborts all of the backend's collectives when the limit
// ends, as NCCL's does.
//
// Bytes go over a backend of the processor. Tensors are kept until somebody waits, as NCCL does.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include "operators.h"

namespace late {

using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

using Aborted = std::shared_ptr<std::atomic<bool>>;  // of one backend

class Work final : public c10d::Work {
 public:
  Work(int device, EventPtr end, Tensors kept, Aborted aborted)
      : device_(device),
        end_(std::move(end)),
        kept_(std::move(kept)),
        aborted_(std::move(aborted)) {}
  bool isCompleted() override { return end_->done(); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    stream_of(device_)->wait_for(end_);
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds limit) override {
    if (limit > std::chrono::milliseconds::zero() && !end_->done_within(limit)) {
      *aborted_ = true;
      ++counts.aborts;
    }
    TORCH_CHECK(!*aborted_, "late: the communicator was aborted");
    synchronize();
    return true;
  }

 private:
  int device_;
  EventPtr end_;
  Tensors kept_;
  Aborted aborted_;
};

class Backend final : public c10d::Backend {
 public:
  Backend(c10::intrusive_ptr<c10d::Backend> under, int rank, int size,
          std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size),
        under_(std::move(under)),
        options_(c10::make_intrusive<Options>("late", timeout)) {}

  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return put(tensors,
               [options](auto& under, Tensors& own) { return under.broadcast(own, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return put(tensors,
               [options](auto& under, Tensors& own) { return under.allreduce(own, options); });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return put({output, input}, [options](auto& under, Tensors& own) {
      return under._allgather_base(own[0], own[1], options);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    Tensors all = outputs[0];
    all.push_back(inputs[0]);
    return put(all, [options](auto& under, Tensors& own) {
      Tensors input{own.back()};
      own.pop_back();
      std::vector<Tensors> output{own};
      return under.allgather(output, input, options);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return put({output, input}, [options](auto& under, Tensors& own) {
      return under._reduce_scatter_base(own[0], own[1], options);
    });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& to,
                        std::vector<std::int64_t>& from,
                        const c10d::AllToAllOptions& options) override {
    return put({output, input}, [to, from, options](auto& under, Tensors& own) mutable {
      return under.alltoall_base(own[0], own[1], to, from, options);
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return put(
        tensors, [=](auto& under, Tensors& own) { return under.send(own, to, tag); }, "send");
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return put(
        tensors, [=](auto& under, Tensors& own) { return under.recv(own, from, tag); }, "recv");
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    under_->barrier(options)->wait();
    auto end = std::make_shared<Event>();
    end->end(Clock::now());
    return c10::make_intrusive<Work>(current_device, end, Tensors{}, aborted_);
  }

 private:
  using Call = std::function<WorkPtr(c10d::Backend&, Tensors&)>;

  WorkPtr put(const Tensors& tensors, Call call, const std::string& line = "collectives") {
    TORCH_CHECK(!*aborted_, "late: the communicator was aborted");
    const int device = tensors[0].device().index();
    Stream* stream = stream_for(line, device);
    stream->wait_for(stream_of(device)->mark());
    std::vector<Place> places(tensors.begin(), tensors.end());
    double nbytes = 0;
    for (const Tensor& tensor : tensors) nbytes += tensor.numel() * tensor.itemsize();
    stream->put(
        [under = under_, places, call = std::move(call)] {
          Tensors own;
          for (const auto& place : places) own.push_back(place.raw());
          call(*under, own)->wait();
        },
        pace.link > 0 ? nbytes / pace.link : 0.0);
    return c10::make_intrusive<Work>(device, stream->mark(), tensors, aborted_);
  }
  Stream* stream_for(const std::string& line, int device) {
    std::lock_guard hold(mutex_);
    auto [found, is_new] = streams_.try_emplace({line, device});
    if (is_new) found->second = Streams::all().at(device, Streams::all().make(device));
    return found->second;
  }

  c10::intrusive_ptr<c10d::Backend> under_;
  c10::intrusive_ptr<Options> options_;
  Aborted aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, Stream*> streams_;
};

inline void define_backend(pybind11::module_& module) {
  pybind11::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def_property_readonly("options", &Backend::getBackendOptions);
  module.def("make_backend", [](c10::intrusive_ptr<c10d::Backend> under, int rank, int size,
                                std::chrono::milliseconds timeout) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<Backend>(std::move(under), rank, size, timeout));
  });
}

}  // namespace late
