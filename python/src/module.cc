// moesaic._core: the extension module.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "cpu/tiers.h"
#include "errors.h"
#include "files.h"
#include "fork.h"
#include "gil.h"
#include "layer.h"
#include "loader_options.h"
#include "moesaic/device.h"
#include "moesaic/interop/own_layer.h"
#include "moesaic/log.h"
#include "moesaic/quant.h"
#include "numerics.h"
#include "own_arguments.h"
#include "routing.h"
#include "specs.h"
#include "tensors.h"
#include "tool_main.h"
#include "version.h"
#include "weight_loader.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

nb::dict environment() {
  const CudaInfo cuda = query_cuda();
  nb::dict gpu;
  gpu["built"] = cuda.built;
  gpu["available"] = cuda.available;
  gpu["reason"] = cuda.reason;
  nb::list devices;
  for (const CudaDeviceInfo& d : cuda.devices) devices.append(d.name);
  gpu["devices"] = devices;
  const Result<const cpu::CpuKernels*> kernels = cpu::current_kernels();
  nb::dict d;
  d["version"] = tool::version();
  d["commit"] = tool::commit();
  d["cpu"] = tool::cpu_model_name();
  d["cpu_tier"] = kernels.ok() ? std::string((*kernels)->name) : kernels.status().to_string();
  d["threads"] = cpu::resolve_threads(0);
  d["cuda"] = gpu;
  return d;
}

int run_tool(const std::vector<std::string>& arguments) {
  std::vector<std::string> copies = arguments;
  std::vector<char*> argv;
  for (std::string& a : copies) argv.push_back(a.data());
  argv.push_back(nullptr);
  int code = 0;
  {
    const GilReleased released;
    code = tool::tool_main(static_cast<int>(copies.size()), argv.data());
  }
  install_log_sink();
  return code;
}

nb::object activate(nb::handle activation, nb::handle x, const std::string& gate_up,
                    nb::handle out) {
  const ActivationSpec spec = activation_of(activation);
  const TensorArg in("x", x);
  TensorArg given("out", out);
  const GateUpLayout layout = layout_of(gate_up, spec.kind);
  std::vector<std::int64_t> dims(in.view().shape.dims().begin(), in.view().shape.dims().end());
  if (is_gated(spec.kind) && !dims.empty()) dims.back() /= 2;
  TensorView to;
  nb::object result = nb::borrow(out);
  if (given.present()) {
    to = given.writable("out");
  } else {
    result = in.like(in.view().dtype, dims, &to);
  }
  Status status;
  {
    const GilReleased released;
    status = apply_activation(spec, layout, in.view(), to);
  }
  check(status);
  return result;
}

std::vector<std::string> scheme_names() {
  std::vector<std::string> names;
  for (const Scheme& s : quant_schemes()) names.emplace_back(s.name);
  for (const Scheme& s : stored_schemes()) {
    if (std::find(names.begin(), names.end(), s.name) == names.end()) names.emplace_back(s.name);
  }
  return names;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The library's part of moesaic.";
  install_log_sink();
  watch_forks();
  bind_tensor(m);
  bind_specs(m);
  bind_files(m);
  bind_loader_options(m);
  bind_weight_loader(m);
  bind_numerics(m);
  bind_trace(m);
  bind_fused_moe(m);
  bind_routed_experts(m);
  bind_routing_stages(m);
  m.def("environment", &environment, nb::sig("def environment() -> dict[str, typing.Any]"));
  m.def("note_openmp_threads", &note_openmp_threads,
        "Called before a fork where other code of this process may have made OpenMP's threads.");
  m.def("quant_schemes", &scheme_names, "Names of all schemes, those that only files have last.");
  m.def("apply_activation", &activate, nb::arg("activation"), nb::arg("x"), nb::kw_only(),
        nb::arg("gate_up") = "gate_then_up", nb::arg("out").none() = nb::none(),
        nb::sig("def apply_activation(activation: str | Activation, x: typing.Any, *, "
                "gate_up: str = 'gate_then_up', out: typing.Any = None) -> typing.Any"),
        "The activation of rows [rows, 2d] (gated, gate_up says how they lie) or [rows, d], F32, "
        "BF16 or F16, contiguous, in fp32, rounded once to out [rows, d].");
  m.def("run_tool", &run_tool, nb::arg("argv"), "The command-line tool; returns its exit code.");
  m.def(
      "raise_status",
      [](const std::string& code, const std::string& text) {
        for (int i = 1; i <= static_cast<int>(StatusCode::kInternal); ++i) {
          const auto c = static_cast<StatusCode>(i);
          if (status_code_name(c) == code) raise(c, text);
        }
      },
      nb::arg("code"), nb::arg("text"), "For tests: raises as the library would.");
}

}  // namespace moesaic::python
