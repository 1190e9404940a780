// What moesaic.FusedMoE and moesaic.RoutedExperts have in common: a layer of the library, calls with
// tensors of the caller's, and properties.
#pragma once

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "callbacks.h"
#include "fork.h"
#include "moesaic/checkpoint.h"
#include "moesaic/fused_moe.h"
#include "moesaic/tensor.h"

namespace moesaic::python {

struct Layer {
  explicit Layer(FusedMoE made) : layer(std::move(made)) {}
  FusedMoE layer;
  std::int64_t made_at = fork_count();
  bool drop_beyond = false;  // ids from num_experts on are slots without an expert
};

// Arguments of a call; None where there is none.
struct CallTensors {
  nanobind::handle x, router_logits, topk_ids, topk_weights, input_ids, padding_mask, out,
      shared_out;
};

// What a call returns beside its output.
struct Traced {
  bool stages = false;    // a Trace
  bool numerics = false;  // one with what rounding did
};

// One call: a new output of the kind of `x`, or `out`; with anything of `traced` a pair of it and a
// Trace. `stream`: tensors.h, stream_of. `copy`: host tensors may go to a layer on a GPU and back. Raises.
nanobind::object run(const Layer& self, const CallTensors& tensors, nanobind::handle stream,
                     Traced traced, bool copy);

// Of a call: a mask of rows, Bool or U8, as U8 [M].
ConstTensorView padding_of(const TensorView& mask);
// Of a call: ids of tokens [M], those of I64 and U32 on a CPU as I32 in `buffer`. Values that I32 does not
// have are -1 in rows of padding and where they are not `used`, kInvalidArgument else. Raises.
ConstTensorView token_ids(const TensorView& tokens, const ConstTensorView& padding, bool used,
                          std::vector<std::int32_t>* buffer);

// Whether a layer can be made, as far as that is known without its weights: what create says of the
// options, and kUnsupported where no backend takes it. Needs no GIL.
Result<LayerExplanation> check_options(const MoeLayerFormat& format,
                                       const FusedMoE::Options& options);
// What both classes are made with.
FusedMoE::Options options_of(const std::string& quant, nanobind::handle device,
                             std::int64_t max_tokens, nanobind::handle num_threads,
                             const std::optional<std::string>& backend);
// Of weights whose `experts` and `shared` the caller's Ctrl-C may interrupt. Raises.
FusedMoE create_guarded(Result<MoeLayerWeights> weights, const FusedMoE::Options& options,
                        CallGuard* guard);
// A layer of files, every expert of it. Raises.
Result<MoeLayerWeights> load_guarded(const Checkpoint& checkpoint, int layer,
                                     const FusedMoE::Options& options, CallGuard* guard);

void bind_trace(nanobind::module_& m);
void bind_fused_moe(nanobind::module_& m);
void bind_routed_experts(nanobind::module_& m);

template <class T>
void bind_common(nanobind::class_<T>& c) {
  c.def_prop_ro("spec", [](const T& l) { return l.layer.spec(); })
      .def_prop_ro("device", [](const T& l) { return l.layer.device().to_string(); })
      .def_prop_ro(
          "quant", [](const T& l) { return std::string(l.layer.quant().name); },
          "Name of the scheme in force.")
      .def_prop_ro(
          "bound", [](const T& l) { return l.layer.quant().output_bound; },
          "Upper bound of the relative L2 error against float64 on the same stored weights, of an "
          "output in F32: one in BF16 or F16 is rounded once more (docs/accuracy.md).")
      .def_prop_ro(
          "experts_backend", [](const T& l) { return l.layer.experts_backend(); },
          "Name of the kernels that run.")
      .def_prop_ro(
          "determinism", [](const T& l) { return l.layer.determinism(); },
          "What the bits of a result depend on, in words.")
      .def_prop_ro(
          "weight_bytes", [](const T& l) { return l.layer.weight_bytes(); }, "Of packed weights.")
      .def_prop_ro(
          "workspace_bytes", [](const T& l) { return l.layer.workspace_bytes(); },
          "Held for calls of max_tokens rows.")
      .def(
          "explain", [](const T& l) { return l.layer.explain(); },
          "Every row of the catalogue, with the reason where it was refused.")
      .def("__repr__", [](const T& l) {
        const MoeLayerSpec& s = l.layer.spec();
        return fmt::format("<moesaic layer: {} experts of {} x {}, top {}, {} by {} on {}>",
                           s.num_experts, s.hidden_size, s.intermediate_size, s.routing.top_k,
                           l.layer.quant().name, l.layer.experts_backend(),
                           l.layer.device().to_string());
      });
  c.def(
      "__reduce__",
      [](const T&) -> nanobind::object {
        throw nanobind::type_error(
            "a moesaic layer cannot be copied or pickled: its weights are packed for this "
            "machine; make it again from the checkpoint or the tensors");
      },
      nanobind::sig("def __reduce__(self) -> typing.NoReturn"));
}

}  // namespace moesaic::python
