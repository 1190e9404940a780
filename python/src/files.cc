#include "files.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "callbacks.h"
#include "errors.h"
#include "gil.h"
#include "moesaic/checkpoint.h"
#include "moesaic/convert.h"
#include "moesaic/fused_moe.h"
#include "specs.h"
#include "tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

// str, bytes or os.PathLike, as the system's bytes: a name need not be text.
std::string path_of(nb::handle path) {
  const nb::object bytes = nb::module_::import_("os").attr("fsencode")(path);
  return {PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr()))};
}

FileAccess access_of(const std::string& name) {
  if (name == "mmap") return FileAccess::kMmap;
  if (name == "copy") return FileAccess::kCopy;
  raise(StatusCode::kInvalidArgument,
        fmt::format("access: got \"{}\", need \"mmap\" or \"copy\"", name));
}

void init_checkpoint(Checkpoint* self, nb::handle path, const std::string& access) {
  Checkpoint::Options options;
  options.access = access_of(access);
  const std::string where = path_of(path);
  Result<Checkpoint> opened = Status(StatusCode::kInternal, "not opened");
  {
    const GilReleased released;
    opened = Checkpoint::open(where, options);
  }
  drain_warnings();
  new (self) Checkpoint(unwrap(std::move(opened)));
}

nb::object read_tensor(const Checkpoint& self, const std::string& name) {
  Result<Tensor> read = Status(StatusCode::kInternal, "not read");
  {
    const GilReleased released;
    read = self.read_tensor(name);
  }
  return wrap_tensor(unwrap(std::move(read)));
}

nb::object read_from_file(const TensorFile& self, const std::string& name) {
  Result<Tensor> read = Status(StatusCode::kInternal, "not read");
  {
    const GilReleased released;
    read = self.read(name);
  }
  return wrap_tensor(unwrap(std::move(read)));
}

LayerExplanation explain(nb::handle what, std::optional<int> layer, const std::string& quant,
                         nb::handle device, std::int64_t max_tokens,
                         const std::optional<std::string>& backend) {
  FusedMoE::Options options;
  options.quant = quant;
  options.device = device_of(device);
  options.max_tokens = max_tokens;
  options.backend = backend.value_or("");
  if (nb::isinstance<MoeLayerSpec>(what)) {
    const auto& spec = nb::cast<const MoeLayerSpec&>(what);
    if (layer && *layer != spec.layer) {
      raise(StatusCode::kInvalidArgument,
            fmt::format("layer: got {} with the LayerSpec of layer {}, need none", *layer,
                        spec.layer));
    }
    return unwrap(explain_layer(spec, options));
  }
  if (!nb::isinstance<Checkpoint>(what)) {
    throw nb::type_error("explain() needs a moesaic.LayerSpec or a moesaic.Checkpoint");
  }
  const auto& checkpoint = nb::cast<const Checkpoint&>(what);
  if (!layer && checkpoint.layers().empty()) {
    raise(StatusCode::kNotFound, "layer: got none of a checkpoint without MoE layers");
  }
  const int index = layer ? *layer : checkpoint.layers().front().layer;
  return unwrap(explain_layer(unwrap(checkpoint.check_layer(index)), options));
}

ConvertReport convert(nb::handle source, nb::handle target, const std::string& quant,
                      nb::handle num_threads, nb::handle progress, bool replace) {
  const std::string from = path_of(source), to = path_of(target);
  CallGuard guard(progress);
  ConvertOptions options;
  options.scheme = quant;
  options.num_threads = threads_of(num_threads);
  options.progress = guard.progress();
  options.should_stop = [&guard] { return guard.stop(); };
  options.replace_any_folder = replace;
  Result<ConvertReport> report = Status(StatusCode::kInternal, "not converted");
  {
    const GilReleased released;
    report = convert_checkpoint(from, to, options);
  }
  drain_warnings();
  if (guard.stopped()) throw nb::python_error();
  return unwrap(std::move(report));
}

}  // namespace

void bind_files(nb::module_& m) {
  nb::class_<Checkpoint>(
      m, "Checkpoint",
      "A folder with config.json and safetensors, or a .gguf file; reads headers only.")
      .def("__init__", &init_checkpoint, nb::arg("path"), nb::kw_only(), nb::arg("access") = "mmap",
           nb::sig(
               "def __init__(self, path: str | os.PathLike[str], *, access: str = 'mmap') -> None"))
      .def_prop_ro("model_type", [](const Checkpoint& c) { return c.model_type(); })
      .def_prop_ro(
          "layers",
          [](const Checkpoint& c) {
            return std::vector<MoeLayerSpec>(c.layers().begin(), c.layers().end());
          },
          "MoE layers in ascending order.")
      .def(
          "layer", [](const Checkpoint& c, int index) { return unwrap(c.layer(index)); },
          nb::arg("index"),
          "The MoE layer of that number in the model. NotFound lists those there are.")
      .def(
          "layer_bytes",
          [](const Checkpoint& c, int index) {
            check(c.layer(index).status());
            return c.layer_bytes(index);
          },
          nb::arg("index"), "Bytes of all tensors of the layer's block, as stored.")
      .def("problems", &Checkpoint::problems,
           "What is odd but stops not every layer, in words; empty: nothing.")
      .def("read_tensor", &read_tensor, nb::arg("name"),
           nb::sig("def read_tensor(self, name: str) -> Tensor"),
           "Any tensor of the files, copied. NotFound names the nearest.");
  nb::class_<TensorFile>(m, "TensorFile", "One safetensors file.")
      .def(
          "__init__",
          [](TensorFile* self, nb::handle path) {
            new (self) TensorFile(unwrap(TensorFile::open(path_of(path))));
          },
          nb::arg("path"), nb::sig("def __init__(self, path: str | os.PathLike[str]) -> None"))
      .def("names", &TensorFile::names)
      .def("read", &read_from_file, nb::arg("name"),
           nb::sig("def read(self, name: str) -> Tensor"));
  m.def("explain", &explain, nb::arg("what"), nb::arg("layer") = nb::none(), nb::kw_only(),
        nb::arg("quant") = "as-is", nb::arg("device").none() = "cpu", nb::arg("max_tokens") = 512,
        nb::arg("backend") = nb::none(),
        nb::sig("def explain(what: LayerSpec | Checkpoint, layer: int | None = None, *, "
                "quant: str = 'as-is', device: typing.Any = 'cpu', max_tokens: int = 512, "
                "backend: str | None = None) -> Explanation"),
        "Which backends take a layer and why not the others, without its weights.");
  nb::class_<ConvertReport::Layer>(m, "ConvertedLayer", "What became of one layer's experts.")
      .def_ro("layer", &ConvertReport::Layer::layer)
      .def_ro("rel_l2_weights", &ConvertReport::Layer::rel_l2_weights)
      .def_ro("bytes_in", &ConvertReport::Layer::bytes_in)
      .def_ro("bytes_out", &ConvertReport::Layer::bytes_out);
  nb::class_<ConvertReport>(m, "ConvertReport", "What a conversion did.")
      .def_ro("layers", &ConvertReport::layers)
      .def_ro("bytes_in", &ConvertReport::bytes_in)
      .def_ro("bytes_out", &ConvertReport::bytes_out)
      .def_ro("notes", &ConvertReport::notes);
  m.def("convert", &convert, nb::arg("source"), nb::arg("target"), nb::kw_only(), nb::arg("quant"),
        nb::arg("num_threads").none() = nb::none(), nb::arg("progress").none() = nb::none(),
        nb::arg("replace") = false,
        nb::sig("def convert(source: str | os.PathLike[str], target: str | os.PathLike[str], *, "
                "quant: str, num_threads: int | None = None, "
                "progress: collections.abc.Callable[[int, int], object] | None = None, "
                "replace: bool = False) -> ConvertReport"),
        "Writes a checkpoint with the routed experts in another format; everything else as it is.");
  m.def("convert_schemes", [] {
    std::vector<std::string> names;
    for (const std::string_view name : convert_schemes()) names.emplace_back(name);
    return names;
  });
}

}  // namespace moesaic::python
