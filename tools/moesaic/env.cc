// moesaic env: what this binary is, what this machine offers, and why something is unavailable.
#include <fmt/format.h>

#include <memory>
#include <thread>

#include "cpu/tiers.h"
#include "moesaic/communicator.h"
#include "moesaic/device.h"
#include "moesaic/quant.h"
#include "verbs.h"
#include "version.h"

namespace moesaic::tool {
namespace {

Json availability(const Status& status) {
  return {{"available", status.ok()}, {"reason", status.message()}};
}
std::string availability_text(const Status& status) {
  return status.ok() ? "available" : "unavailable: " + status.message();
}

Json cuda_json(const CudaInfo& info) {
  Json devices = Json::array();
  for (const CudaDeviceInfo& d : info.devices) {
    devices.push_back({{"index", d.index},
                       {"name", d.name},
                       {"compute_capability", fmt::format("{}.{}", d.sm_major, d.sm_minor)},
                       {"sms", d.num_sms},
                       {"total_bytes", d.total_bytes},
                       {"available", d.available},
                       {"reason", d.reason}});
  }
  return {{"built", info.built},
          {"available", info.available},
          {"reason", info.reason},
          {"driver_version", info.driver_version},
          {"runtime_version", info.runtime_version},
          {"devices", devices}};
}

std::string cuda_text(const CudaInfo& info) {
  std::string text = info.available ? "cuda     available\n"
                                    : fmt::format("cuda     unavailable: {}\n", info.reason);
  for (const CudaDeviceInfo& d : info.devices) {
    text +=
        fmt::format("  cuda:{} {}, sm_{}{}, {} SMs, {:.1f} GiB{}\n", d.index, d.name, d.sm_major,
                    d.sm_minor, d.num_sms, static_cast<double>(d.total_bytes) / (1 << 30),
                    d.available ? "" : fmt::format(", unavailable: {}", d.reason));
  }
  return text;
}

int run_env(const CommonOptions& options) {
  const Console console = options.console();
  const Result<const cpu::CpuKernels*> kernels = cpu::current_kernels();
  if (!kernels.ok()) return console.fail(kernels.status(), Origin::kOption);
  const std::string_view in_force = (*kernels)->name;
  const std::vector<cpu::TierInfo>& tiers = cpu::cpu_tiers();
  Json tier_json = Json::array();
  for (const cpu::TierInfo& tier : tiers) {
    tier_json.push_back(
        {{"name", tier.name}, {"available", tier.available}, {"reason", tier.reason}});
  }
  Json schemes = Json::array();
  for (const Scheme& scheme : quant_schemes()) schemes.push_back(scheme.name);
  const CudaInfo cuda = query_cuda();
  const std::string cpu = cpu_model_name();
  const unsigned cores = std::thread::hardware_concurrency();
  const int threads = cpu::resolve_threads(0);
  console.emit({{"version", version()},
                {"commit", commit()},
                {"compiler", compiler()},
                {"build_type", build_type()},
                {"cpu",
                 {{"model", cpu},
                  {"cores", cores},
                  {"threads", threads},
                  {"tier", in_force},
                  {"tiers", tier_json}}},
                {"quant_schemes", schemes},
                {"cuda", cuda_json(cuda)},
                {"nccl", availability(nccl_available())},
                {"peer_windows", availability(peer_windows_available())},
                {"nccl_windows", availability(nccl_windows_available())},
                {"mpi", availability(mpi_available())}});

  console.print(version_text() + "\n");
  console.print(
      fmt::format("cpu      {}, {} core(s), {} thread(s) by default\n", cpu, cores, threads));
  for (const cpu::TierInfo& tier : tiers) {
    console.print(fmt::format("  tier   {:<12} {}\n", tier.name,
                              tier.name == in_force ? "in force"
                              : tier.available      ? "available"
                                                    : fmt::format("unavailable: {}", tier.reason)));
  }
  std::string names;
  for (const Scheme& scheme : quant_schemes()) names += fmt::format(" {}", scheme.name);
  console.print(fmt::format("schemes {}\n", names));
  console.print(cuda_text(cuda));
  console.print(
      fmt::format("nccl     {}\npeers    {}\n  nccl   {}\nmpi      {}\n",
                  availability_text(nccl_available()), availability_text(peer_windows_available()),
                  availability_text(nccl_windows_available()), availability_text(mpi_available())));
  return kExitOk;
}

}  // namespace

Verb make_env(CLI::App& root) {
  auto options = std::make_shared<CommonOptions>();
  CLI::App* app =
      add_verb(root, "env", "Versions, CPU tiers, devices, and why something is unavailable",
               "  moesaic env\n"
               "  moesaic env --json\n");
  add_output_options(*app, *options);
  return {app, [options] { return run_env(*options); }};
}

}  // namespace moesaic::tool
