#include "weight_loader.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/fault.h"
#include "errors.h"
#include "moesaic/device_tensor.h"
#include "tensors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

// Names and texts of a mapping, in its order.
template <class Take>
void each_text(nb::handle mapping, const Take& take) {
  if (mapping.is_none()) return;
  for (const nb::handle item : nb::borrow<nb::object>(mapping.attr("items")())) {
    take(nb::cast<std::string>(item[0]), nb::cast<std::string>(item[1]));
  }
}

WeightLoader::Options loader_options(nb::handle names, bool experts_only) {
  WeightLoader::Options options;
  options.experts_only = experts_only;
  each_text(names, [&](std::string from, std::string to) {
    options.names.push_back({std::move(from), std::move(to)});
  });
  return options;
}

LoaderObject* loader_from_config(nb::handle config, int layer, nb::handle names, bool experts_only,
                                 nb::handle side_files) {
  const bool text = nb::isinstance<nb::str>(config);
  const nb::object json =
      text ? nb::borrow(config) : nb::module_::import_("json").attr("dumps")(config);
  WeightLoader::Options options = loader_options(names, experts_only);
  each_text(side_files, [&](std::string name, std::string contents) {
    options.side_files.emplace_back(std::move(name), std::move(contents));
  });
  return new LoaderObject(
      unwrap(WeightLoader::from_config(nb::cast<std::string>(json), layer, options)));
}

LoaderObject* loader_from_checkpoint(const Checkpoint& checkpoint, int layer, nb::handle names,
                                     bool experts_only) {
  return new LoaderObject(unwrap(
      WeightLoader::from_checkpoint(checkpoint, layer, loader_options(names, experts_only))));
}

bool load(LoaderObject& self, const std::string& name, nb::handle tensor,
          std::optional<std::uint32_t> ggml_type) {
  const TensorArg given(name, tensor);
  if (!given.present()) {
    raise(StatusCode::kInvalidArgument, name + ": got None, need a tensor");
  }
  Result<bool> kept = false;
  {
    const nb::gil_scoped_release released;
    const std::lock_guard<std::mutex> lock(self.mutex);
    ConstTensorView view = given.view();
    Tensor host;
    Status copied;
    if (view.device.is_cuda()) {  // the library keeps host memory
      Result<Tensor> made = Tensor::uninitialized(view.dtype, view.shape);
      copied = made.status();
      if (copied.ok()) {
        host = std::move(made).value();
        copied = copy_tensor(view, host.view());
        view = host.view();
      }
    }
    if (!copied.ok()) {
      kept = copied.with_context(name);
    } else {
      kept = ggml_type ? self.loader.load(name, view, *ggml_type) : self.loader.load(name, view);
    }
  }
  return unwrap(std::move(kept)) && !MOESAIC_FAULT(python_loader_says_not_kept);
}

std::vector<std::string> load_weights(LoaderObject& self, nb::handle pairs) {
  std::vector<std::string> kept;
  for (const nb::handle pair : nb::borrow<nb::object>(pairs)) {
    auto name = nb::cast<std::string>(pair[0]);
    const nb::object tensor = pair[1];
    if (load(self, name, tensor, std::nullopt)) kept.push_back(std::move(name));
  }
  return kept;
}

}  // namespace

Result<MoeLayerWeights> finish(LoaderObject* self) {
  const nb::gil_scoped_release released;
  const std::lock_guard<std::mutex> lock(self->mutex);
  return self->loader.finish();
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
      nb::arg("side_files").none() = nb::none(),
      nb::sig("def from_config(config: str | collections.abc.Mapping[str, typing.Any], layer: int, "
              "*, names: collections.abc.Mapping[str, str] | None = None, "
              "experts_only: bool = False, "
              "side_files: collections.abc.Mapping[str, str] | None = None) -> WeightLoader"),
      "Of a layer as config.json, its text or what it holds, describes it. names: what of the "
      "caller's names is to be replaced, and by what, in order. side_files: contents of "
      "hf_quant_config.json and the like, by name.");
  c.def_static("from_checkpoint", &loader_from_checkpoint, nb::arg("checkpoint"), nb::arg("layer"),
               nb::kw_only(), nb::arg("names").none() = nb::none(), nb::arg("experts_only") = false,
               nb::sig("def from_checkpoint(checkpoint: Checkpoint, layer: int, *, "
                       "names: collections.abc.Mapping[str, str] | None = None, "
                       "experts_only: bool = False) -> WeightLoader"),
               "As the files of a checkpoint describe the layer; none of their tensors is read.");
  c.def("load", &load, nb::arg("name"), nb::arg("tensor").none(), nb::kw_only(),
        nb::arg("ggml_type") = nb::none(),
        nb::sig("def load(self, name: str, tensor: typing.Any, *, ggml_type: int | None = None) "
                "-> bool"),
        "Takes one tensor, copying what is needed of it; whether it was kept, or is not this "
        "layer's. After an error nothing has changed. ggml_type: of the blocks of a GGUF file.");
  c.def("load_weights", &load_weights, nb::arg("pairs"),
        nb::sig("def load_weights(self, "
                "pairs: collections.abc.Iterable[tuple[str, typing.Any]]) -> list[str]"),
        "All of them in order; the names that were kept. Stops at the first error.");
  c.def(
      "missing",
      [](LoaderObject& self) {
        Result<std::vector<std::string>> names = Status(StatusCode::kInternal, "not asked");
        {
          const nb::gil_scoped_release released;
          const std::lock_guard<std::mutex> lock(self.mutex);
          names = self.loader.missing();
        }
        return unwrap(std::move(names));
      },
      "Tensors that the layer still lacks.");
  c.def_prop_ro(
      "bytes",
      [](LoaderObject& self) {
        const nb::gil_scoped_release released;
        const std::lock_guard<std::mutex> lock(self.mutex);
        return self.loader.bytes();
      },
      "That are held now.");
}

}  // namespace moesaic::python
