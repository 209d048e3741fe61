// Operators of the late device: outputs are made at the launch, by torch's meta kernels; the
// arithmetic is the processor's, later, on the stream's thread.
//
//   place   where a tensor is, as a job keeps it: an address and a form, and no reference
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"
#include "streams.h"

namespace late {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

inline bool is_late(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

inline void* data_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return nullptr;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  return static_cast<char*>(storage->mutable_data()) + tensor.storage_offset() * tensor.itemsize();
}

// Bytes between a tensor's first element and the end of its last.
inline std::size_t span_of(const Tensor& tensor) {
  std::int64_t last = 0;
  for (int i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return (last + 1) * tensor.itemsize();
}

struct Place {
  void* data;
  std::vector<std::int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool is_conj, is_neg;

  explicit Place(const Tensor& tensor)
      : data(data_of(tensor)),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        is_conj(tensor.is_conj()),
        is_neg(tensor.is_neg()) {}

  // The bytes as a tensor of the processor. Only jobs may ask for one.
  Tensor raw() const {
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    if (!data) return at::empty_strided(sizes, strides, options);
    void* usable = Memory::all().has(data) ? Memory::all().usable(data) : data;
    return at::from_blob(usable, sizes, strides, options);
  }
  Tensor value() const {
    Tensor tensor = raw();
    if (is_conj) tensor = tensor.conj();
    if (is_neg) tensor = at::_neg_view(tensor);
    return tensor;
  }
};

// --- new tensors and views ---

inline Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                    std::optional<c10::Layout>, std::optional<c10::Device> device,
                    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice there(device ? device->index() : -1);
  return at::detail::empty_generic(sizes, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                            std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                            std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice there(device ? device->index() : -1);
  return at::detail::empty_strided_generic(sizes, strides, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline Tensor empty_like(const Tensor& form, int device) {
  return empty_strided(form.sizes(), form.strides(), form.scalar_type(), std::nullopt,
                       c10::Device(kType, device), std::nullopt);
}

inline const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size,
                            std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  std::size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::cpu::set_(self, source);
}
inline Tensor& set_storage(Tensor& self, at::Storage source) { return at::cpu::set_(self, source); }
inline Tensor& set_storage_at(Tensor& self, at::Storage source, std::int64_t offset,
                              c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
inline Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<std::int64_t>(offset->expect_int()) : std::nullopt);
}
inline Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size,
                            c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}
inline bool has_compatible_copy_type(const Tensor&, const Tensor&) { return true; }

// --- copies ---

inline void copy_later(Stream* stream, const Tensor& to, const Tensor& from, bool by_link,
                       Tensor kept = {}) {
  const double rate = by_link ? pace.link : pace.memory;
  const double seconds = rate > 0 ? to.numel() * to.itemsize() / rate : 0.0;
  stream->put([to = Place(to), from = Place(from), kept] { to.raw().copy_(from.value()); },
              seconds);
}

inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  Stream* stream = stream_of((is_late(from) ? from : to).device().index());
  auto is_registered = [](const Tensor& host) {
    return Registered::all().has(data_of(host), span_of(host));
  };
  // torch's own pinned memory is not used again before its copies are over. A region's may be.
  auto if_torchs = [](const Tensor& host) {
    const auto deleter = host.storage().data_ptr().get_deleter();
    return deleter == &Registered::give_back ? host : Tensor();
  };
  const bool waits =
      is_late(from) ? !is_late(to) && !(non_blocking && is_registered(to)) : !non_blocking;
  TORCH_CHECK(!waits || !counts.refuses_copies || !counts.trains(),
              "called a synchronizing late operation");
  if (is_late(from) && is_late(to)) {
    copy_later(stream, to, from, false);
  } else if (is_late(from)) {
    copy_later(stream, to, from, true, if_torchs(to));
  } else if (non_blocking && is_registered(from)) {
    copy_later(stream, to, from, true, if_torchs(from));
  } else {  // pageable memory is read at once, into a copy
    const Tensor kept = from.clone();
    copy_later(stream, to, kept, true, kept);
  }
  if (waits) stream->synchronize();
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

inline at::Scalar to_scalar(const Tensor& self) {
  auto host = at::empty({}, self.options().device(at::kCPU));
  copy_from(self.reshape({}), host, false);
  return host.item();
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  if (void* data = data_of(self))
    Memory::all().record(data, Streams::all().at(stream.device_index(), stream.id()));
}

// --- all other operators ---

inline Tensor meta_of(const Tensor& tensor) {
  if (!is_late(tensor)) return tensor;
  auto meta =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// An argument as a job keeps it.
struct Kept {
  enum class Kind { kOther, kTensor, kList, kOptionalList };
  Kind kind = Kind::kOther;
  IValue other = {};
  std::vector<std::optional<Place>> places = {};

  IValue value() const {
    if (kind == Kind::kOther) return other;
    if (kind == Kind::kTensor) return places[0]->value();
    c10::List<Tensor> list;
    c10::List<std::optional<Tensor>> optional_list;
    for (const auto& place : places) {
      if (kind == Kind::kList)
        list.push_back(place ? place->value() : Tensor());
      else if (place)
        optional_list.push_back(place->value());
      else
        optional_list.push_back(std::nullopt);
    }
    return kind == Kind::kList ? IValue(list) : IValue(optional_list);
  }
};

// The arguments of one launch: as they were given, as the meta kernel gets them, and as the job
// keeps them: a job that kept a tensor would free it on the stream's thread.
class Arguments {
 public:
  Arguments(const OperatorHandle& op, const Stack& stack) : device(current_device) {
    const auto count = op.schema().arguments().size();
    for (auto i = stack.size() - count; i < stack.size(); ++i) take(op, stack[i]);
  }

  int device;
  std::vector<IValue> given;
  Stack metas;
  std::vector<Kept> kept;
  double nbytes = 0;  // of all tensors

  // Notes that a tensor among them got another form.
  void move(std::size_t index, const Tensor& tensor) { kept[index].places = {Place(tensor)}; }

 private:
  void take(const OperatorHandle& op, const IValue& value) {
    given.push_back(value);
    Kept one;
    if (value.isTensor() && is_late(value.toTensor())) {
      one.kind = Kept::Kind::kTensor;
      note(value.toTensor(), one);
      metas.emplace_back(meta_of(value.toTensor()));
    } else if (value.isTensorList()) {
      one.kind = Kept::Kind::kList;
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        check_here(op, tensor);
        note(tensor, one);
        list.push_back(meta_of(tensor));
      }
      metas.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      one.kind = Kept::Kind::kOptionalList;
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor) check_here(op, *tensor);
        note(tensor.value_or(Tensor()), one);
        if (tensor && tensor->defined())
          list.push_back(meta_of(*tensor));
        else
          list.push_back(std::nullopt);
      }
      metas.emplace_back(list);
    } else if (value.isDevice()) {
      one.other = c10::Device(at::kCPU);
      metas.emplace_back(c10::Device(at::kMeta));
    } else {
      one.other = value;
      metas.push_back(value);
    }
    kept.push_back(std::move(one));
  }
  void check_here(const OperatorHandle& op, const Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || is_late(tensor), "late: a list with a tensor of the host in ",
                op.schema().name());
  }
  void note(const Tensor& tensor, Kept& one) {
    if (!tensor.defined()) {
      one.places.emplace_back(std::nullopt);
      return;
    }
    device = tensor.device().index();
    nbytes += tensor.numel() * tensor.itemsize();
    one.places.emplace_back(Place(tensor));
  }
};

// The results of one launch: tensors as users get them, and where the job puts each.
class Results {
 public:
  Results(const OperatorHandle& op, Arguments& arguments, const Stack& metas) {
    const auto& returns = op.schema().returns();
    for (std::size_t i = 0; i < returns.size(); ++i) {
      const auto* alias = returns[i].alias_info();
      if (alias && alias->isWrite())
        given.push_back(written(op, *alias, arguments, metas[i]));
      else
        make(op, alias != nullptr, i, arguments.device, metas[i]);
    }
  }

  std::vector<IValue> given;
  std::vector<std::pair<std::size_t, std::vector<Place>>> places;
  double nbytes = 0;

 private:
  static IValue written(const OperatorHandle& op, const c10::AliasInfo& alias, Arguments& arguments,
                        const IValue& meta) {
    const auto& declared = op.schema().arguments();
    for (std::size_t i = 0; i < declared.size(); ++i) {
      const auto* own = declared[i].alias_info();
      if (!own || !own->isWrite() || own->beforeSets() != alias.beforeSets()) continue;
      const IValue& value = arguments.given[i];
      if (value.isTensor() && value.toTensor().sizes() != meta.toTensor().sizes()) {
        value.toTensor().resize_(meta.toTensor().sizes());  // an out= of another size
        arguments.move(i, value.toTensor());
      }
      return value;
    }
    TORCH_CHECK(false, "late: nothing is written by ", op.schema());
  }
  void make(const OperatorHandle& op, bool is_view, std::size_t index, int device,
            const IValue& meta) {
    TORCH_CHECK(!is_view, "late: a view by ", op.schema());
    std::vector<Place> to;
    auto one = [&](const Tensor& form) {
      if (!form.defined()) return Tensor();
      Tensor tensor = empty_like(form, device);
      nbytes += tensor.numel() * tensor.itemsize();
      to.emplace_back(tensor);
      return tensor;
    };
    if (meta.isTensor()) {
      given.emplace_back(one(meta.toTensor()));
    } else if (meta.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& form : meta.toTensorVector()) tensors.push_back(one(form));
      given.emplace_back(tensors);
    } else {
      given.push_back(meta);
    }
    if (!to.empty()) places.emplace_back(index, std::move(to));
  }
};

// Operations of a product of matrices; 0 for any other operator, whose bytes count.
inline double flops_of(const OperatorHandle& op, const Stack& metas) {
  static const std::set<std::string> products{"aten::mm", "aten::bmm", "aten::addmm",
                                              "aten::baddbmm"};
  if (!products.contains(op.schema().name())) return 0.0;
  std::vector<Tensor> factors;
  for (const auto& meta : metas)
    if (meta.isTensor()) factors.push_back(meta.toTensor());
  if (op.schema().name().find("add") != std::string::npos)  // an output may be there, too
    factors.erase(factors.begin());  // what is added
  return 2.0 * factors[0].numel() * factors[1].size(-1);
}

inline double seconds_of(const OperatorHandle& op, const Arguments& arguments,
                         const Stack& metas_before, const Results& results) {
  if (pace.link <= 0) return 0.0;
  if (const double flops = flops_of(op, metas_before); flops > 0) return flops / pace.flops;
  return (arguments.nbytes + results.nbytes) / pace.memory;
}

// Means and deviations of a norm are fp32 on devices, and of the input's type on the processor.
inline void match_processor(const OperatorHandle& op, Stack& values) {
  if (op.schema().name() != "aten::native_layer_norm_backward") return;
  const auto type = values[1].toTensor().scalar_type();
  if (values[5].isTensor() && values[5].toTensor().scalar_type() != type) return;  // mixed: fp32
  for (int at : {3, 4}) values[at] = values[at].toTensor().to(type);
}

inline void launch(const OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, *stack);
  Stack metas = arguments.metas;
  op.callBoxed(&metas);
  Results results(op, arguments, metas);
  const double seconds = seconds_of(op, arguments, arguments.metas, results);
  stream_of(arguments.device)
      ->put(
          [op, kept = std::move(arguments.kept), places = results.places] {
            Stack values;
            for (const auto& each : kept) values.push_back(each.value());
            match_processor(op, values);
            op.callBoxed(&values);
            for (const auto& [index, to] : places) {
              if (values[index].isTensor()) {
                to[0].raw().copy_(values[index].toTensor());
                continue;
              }
              std::size_t next = 0;
              for (const Tensor& tensor : values[index].toTensorVector())
                if (tensor.defined()) to[next++].raw().copy_(tensor);
            }
          },
          seconds);
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results.given) stack->push_back(std::move(result));
}

}  // namespace late
