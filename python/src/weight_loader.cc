#include "weight_loader.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/fault.h"
#include "errors.h"
#include "gil.h"
#include "layer.h"
#include "loader_options.h"
#include "tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

// Names and texts of a mapping, in its order.
template <class Take>
void each_text(std::string_view field, nb::handle mapping, const Take& take) {
  if (mapping.is_none()) return;
  if (!nb::hasattr(mapping, "items")) raise_not_cast(field, mapping, "a mapping of texts");
  for (const nb::handle item : nb::borrow<nb::object>(mapping.attr("items")())) {
    take(cast_as<std::string>(field, item[0], "a mapping of texts"),
         cast_as<std::string>(field, item[1], "a mapping of texts"));
  }
}

WeightLoader::Options loader_options(nb::handle names, bool experts_only, nb::handle parallel) {
  WeightLoader::Options options;
  options.experts_only = experts_only;
  options.parallel = parallel_of(parallel);
  each_text("names", names, [&](std::string from, std::string to) {
    options.names.push_back({std::move(from), std::move(to)});
  });
  return options;
}

nb::object json_items(nb::handle value);

// The same of plain dicts and lists, without numbers that JSON lacks: they are written as transformers 5
// writes them to files.
nb::object json_value(nb::handle value) {
  if (PyFloat_Check(value.ptr())) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (std::isfinite(number)) return nb::borrow(value);
    nb::dict named;
    named["__float__"] = std::isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity";
    return named;
  }
  if (PyUnicode_Check(value.ptr()) || PyLong_Check(value.ptr()) || value.is_none()) {
    return nb::borrow(value);
  }
  if (Py_EnterRecursiveCall(" in a configuration") != 0) throw nb::python_error();
  try {
    nb::object made = json_items(value);
    Py_LeaveRecursiveCall();
    return made;
  } catch (...) {
    Py_LeaveRecursiveCall();
    throw;
  }
}

nb::object json_items(nb::handle value) {
  if (PyList_Check(value.ptr()) || PyTuple_Check(value.ptr())) {
    nb::list made;
    for (const nb::handle item : value) made.append(json_value(item));
    return made;
  }
  const nb::object mapping = nb::module_::import_("collections.abc").attr("Mapping");
  const int is_mapping = PyObject_IsInstance(value.ptr(), mapping.ptr());
  if (is_mapping < 0) throw nb::python_error();
  if (is_mapping == 0) return nb::borrow(value);
  nb::dict made;
  for (const nb::handle item : nb::object(value.attr("items")())) {
    made[nb::object(item[0])] = json_value(nb::object(item[1]));
  }
  return made;
}

// JSON's text, or what it holds.
std::string json_text(std::string_view field, nb::handle json) {
  constexpr std::string_view kNeed = "text, or what it holds";
  if (nb::isinstance<nb::str>(json)) return cast_as<std::string>(field, json, kNeed);
  const nb::object value = json_value(json);
  nb::object written;
  try {
    written = nb::module_::import_("json").attr("dumps")(value);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    const std::string said = nb::str(nb::handle(error.value())).c_str();
    raise(StatusCode::kInvalidArgument,
          fmt::format("{}: got what JSON does not have ({}), need {}", field, said, kNeed));
  }
  return cast_as<std::string>(field, written, kNeed);
}

LoaderObject* loader_of(Result<WeightLoader> made, const WeightLoader::Options& options) {
  return new LoaderObject(unwrap(std::move(made)), options.parallel);
}

LoaderObject* loader_from_config(nb::handle config, int layer, nb::handle names, bool experts_only,
                                 nb::handle side_files, nb::handle parallel) {
  WeightLoader::Options options = loader_options(names, experts_only, parallel);
  each_text("side_files", side_files, [&](std::string name, std::string contents) {
    options.side_files.emplace_back(std::move(name), std::move(contents));
  });
  return loader_of(WeightLoader::from_config(json_text("config", config), layer, options), options);
}

LoaderObject* loader_from_checkpoint(const Checkpoint& checkpoint, int layer, nb::handle names,
                                     bool experts_only, nb::handle parallel) {
  const WeightLoader::Options options = loader_options(names, experts_only, parallel);
  return loader_of(WeightLoader::from_checkpoint(checkpoint, layer, options), options);
}

LoaderObject* loader_from_spec(const MoeLayerSpec& spec, const ExpertNames& expert_names,
                               nb::handle quantization_config, nb::handle names,
                               nb::handle parallel) {
  const WeightLoader::Options options = loader_options(names, true, parallel);
  const bool plain = quantization_config.is_none() || MOESAIC_FAULT(python_spec_always_plain);
  const std::string quantization =
      plain ? "" : json_text("quantization_config", quantization_config);
  return loader_of(WeightLoader::from_spec(spec, expert_names, quantization, options), options);
}

bool load(LoaderObject& self, const std::string& name, nb::handle tensor,
          std::optional<std::uint32_t> ggml_type) {
  if (tensor.is_none()) raise(StatusCode::kInvalidArgument, name + ": got None, need a tensor");
  bool looked_at = true;
  {
    const GilReleased released;
    const std::lock_guard<std::mutex> lock(self.mutex);
    looked_at = self.loader.looks_at(name) || MOESAIC_FAULT(python_all_pushed_are_viewed);
  }
  if (!looked_at) return false;
  const TensorArg given(name, tensor);
  given.check_not_negated(name);
  given.wait_until_written();
  Result<bool> kept = false;
  {
    const GilReleased released;
    const std::lock_guard<std::mutex> lock(self.mutex);
    const ConstTensorView view = given.view();
    kept = ggml_type ? self.loader.load(name, view, *ggml_type) : self.loader.load(name, view);
  }
  return unwrap(std::move(kept)) && !MOESAIC_FAULT(python_loader_says_not_kept);
}

std::vector<std::string> load_weights(LoaderObject& self, nb::handle pairs) {
  std::vector<std::string> kept;
  for (const nb::handle pair : nb::borrow<nb::object>(pairs)) {
    if ((!PyTuple_Check(pair.ptr()) && !PyList_Check(pair.ptr())) || nb::len(pair) != 2) {
      raise_not_cast("pairs", pair, "pairs of a name and a tensor: of a dict, its items()");
    }
    auto name = cast_as<std::string>("pairs", pair[0], "a text as a tensor's name");
    const nb::object tensor = pair[1];
    if (load(self, name, tensor, std::nullopt)) kept.push_back(std::move(name));
  }
  return kept;
}

}  // namespace

MoeLayerWeights finish(LoaderObject* self, const FusedMoE::Options& options,
                       MoeLayerSpec (*spec_of)(MoeLayerSpec, const FusedMoE::Options&)) {
  const auto take = [&]() -> Result<MoeLayerWeights> {
    const std::lock_guard<std::mutex> lock(self->mutex);
    if (!self->finished) {
      const std::int64_t bytes = self->loader.bytes();
      MOESAIC_ASSIGN_OR_RETURN(self->finished, self->loader.finish());
      self->finished_bytes = bytes;
    }
    MoeLayerFormat format{spec_of(self->finished->spec, options), self->finished->shared_quant};
    const Tensor& gate = self->finished->tensors.gate_weight;
    if (gate.present()) format.gate_dtype = gate.dtype();
    // Of a loader of experts alone, which stays as it is for RoutedExperts.
    if (options.include_gate && !gate.present()) {
      return Status(StatusCode::kInvalidArgument,
                    "include_gate: got True, but the loader has experts alone, need False and the "
                    "routing with every call");
    }
    if (format.spec.shared.intermediate_size > 0 && !self->finished->shared) {
      return Status(StatusCode::kInvalidArgument,
                    "include_shared: got True, but the loader has experts alone, need False");
    }
    MOESAIC_RETURN_IF_ERROR(check_options(format, options).status());
    MoeLayerWeights weights = std::move(*self->finished);
    self->finished.reset();
    return weights;
  };
  Result<MoeLayerWeights> taken = Status(StatusCode::kInternal, "not taken");
  {
    const GilReleased released;
    taken = take();
  }
  return unwrap(std::move(taken));
}

void bind_weight_loader(nb::module_& m) {
  nb::class_<LoaderObject> c(
      m, "WeightLoader",
      "One layer's weights on their way: each tensor whole, under its checkpoint's name, in any "
      "order. FusedMoE.from_loader and RoutedExperts.from_loader make the layer, with the bits "
      "that "
      "the files would give.");
  c.def_static(
      "from_config", &loader_from_config, nb::arg("config"), nb::arg("layer"), nb::kw_only(),
      nb::arg("names").none() = nb::none(), nb::arg("experts_only") = false,
      nb::arg("side_files").none() = nb::none(), nb::arg("parallel").none() = nb::none(),
      nb::sig("def from_config(config: str | collections.abc.Mapping[str, typing.Any], layer: int, "
              "*, names: collections.abc.Mapping[str, str] | None = None, "
              "experts_only: bool = False, "
              "side_files: collections.abc.Mapping[str, str] | None = None, "
              "parallel: Parallel | None = None) -> WeightLoader"),
      "Of a layer as config.json, its text or what it holds, describes it. names: what of the "
      "caller's names is to be replaced, and by what, in order. side_files: contents of "
      "hf_quant_config.json and the like, by name. parallel: the rank whose experts, or slices of "
      "them, are kept; the layer's output is then this rank's part, and the parts of all ranks "
      "add up to one rank's.");
  c.def_static("from_checkpoint", &loader_from_checkpoint, nb::arg("checkpoint"), nb::arg("layer"),
               nb::kw_only(), nb::arg("names").none() = nb::none(), nb::arg("experts_only") = false,
               nb::arg("parallel").none() = nb::none(),
               nb::sig("def from_checkpoint(checkpoint: Checkpoint, layer: int, *, "
                       "names: collections.abc.Mapping[str, str] | None = None, "
                       "experts_only: bool = False, parallel: Parallel | None = None) "
                       "-> WeightLoader"),
               "As the files of a checkpoint describe the layer; none of their tensors is read.");
  c.def_static("from_spec", &loader_from_spec, nb::arg("spec"), nb::arg("expert_names"),
               nb::kw_only(), nb::arg("quantization_config").none() = nb::none(),
               nb::arg("names").none() = nb::none(), nb::arg("parallel").none() = nb::none(),
               nb::sig("def from_spec(spec: LayerSpec, expert_names: ExpertNames, *, "
                       "quantization_config: "
                       "str | collections.abc.Mapping[str, typing.Any] | None = None, "
                       "names: collections.abc.Mapping[str, str] | None = None, "
                       "parallel: Parallel | None = None) -> WeightLoader"),
               "The experts of a layer that is described by hand: sizes, activation and biases by "
               "the spec, the format by a quantization_config as config.json has it (None: plain "
               "weights; spec.quant is not looked at).");
  c.def("load", &load, nb::arg("name"), nb::arg("tensor").none(), nb::kw_only(),
        nb::arg("ggml_type") = nb::none(),
        nb::sig("def load(self, name: str, tensor: typing.Any, *, ggml_type: int | None = None) "
                "-> bool"),
        "Takes one tensor, copying what is needed of it; whether it was kept, or is not this "
        "layer's. After an error nothing has changed. ggml_type: of a tensor of a GGUF file.");
  c.def("load_weights", &load_weights, nb::arg("pairs"),
        nb::sig("def load_weights(self, "
                "pairs: collections.abc.Iterable[tuple[str, typing.Any]]) -> list[str]"),
        "All of them in order; the names that were kept. Stops at the first error.");
  c.def(
      "missing",
      [](LoaderObject& self) {
        Result<std::vector<std::string>> names = Status(StatusCode::kInternal, "not asked");
        {
          const GilReleased released;
          const std::lock_guard<std::mutex> lock(self.mutex);
          names = self.finished ? std::vector<std::string>() : self.loader.missing();
        }
        return unwrap(std::move(names));
      },
      "Tensors that the layer still lacks.");
  c.def_prop_ro(
      "bytes",
      [](LoaderObject& self) {
        const GilReleased released;
        const std::lock_guard<std::mutex> lock(self.mutex);
        return self.finished ? self.finished_bytes : self.loader.bytes();
      },
      "That are held now.");
}

}  // namespace moesaic::python
