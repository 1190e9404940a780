#include "gpu_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "cuda/device_memory.h"
#include "cuda/device_timer.h"
#include "moesaic/device_tensor.h"
#include "moesaic/gate.h"
#include "moesaic/modular_kernel.h"

namespace moesaic::tool {
namespace {

using cuda::DeviceScope;

// Cached data must not survive from one use to the next: several times the 50 MB of an H100's L2.
constexpr std::int64_t kPastTheCache = 256'000'000;

// Launches rotation `rotation` of a stage on tensors of the device.
using EnqueueFn =
    std::function<Status(void* stream, int rotation, const std::vector<ConstTensorView>& in,
                         const std::vector<TensorView>& out)>;

// Device copies of one rotation.
struct OnDevice {
  std::vector<DeviceTensor> memory;
  std::vector<ConstTensorView> in;
  std::vector<TensorView> out;

  static Result<OnDevice> make(Device device, const std::vector<ConstTensorView>& in,
                               const std::vector<TensorView>& out) {
    OnDevice d;
    for (const ConstTensorView& t : in) {
      MOESAIC_ASSIGN_OR_RETURN(DeviceTensor copy, DeviceTensor::copy_of(t, device));
      d.in.emplace_back(copy.view());
      d.memory.push_back(std::move(copy));
    }
    for (const TensorView& t : out) {
      MOESAIC_ASSIGN_OR_RETURN(DeviceTensor made,
                               DeviceTensor::uninitialized(device, t.dtype, t.shape));
      d.out.push_back(made.view());
      d.memory.push_back(std::move(made));
    }
    return d;
  }
};

class DeviceStage final : public GpuStage {
 public:
  DeviceStage(Device device, EnqueueFn enqueue) : device_(device), enqueue_(std::move(enqueue)) {}

  Status run(const std::vector<ConstTensorView>& in, const std::vector<TensorView>& out) override {
    const DeviceScope scope(device_.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_ASSIGN_OR_RETURN(const OnDevice d, OnDevice::make(device_, in, out));
    MOESAIC_RETURN_IF_ERROR(enqueue_(nullptr, 0, d.in, d.out));
    for (std::size_t i = 0; i < out.size(); ++i) {
      MOESAIC_RETURN_IF_ERROR(copy_tensor(d.out[i], out[i]));
    }
    return {};
  }

  Result<TimeFn> timer(const std::vector<std::vector<ConstTensorView>>& in,
                       const std::vector<std::vector<TensorView>>& out) override {
    const DeviceScope scope(device_.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_ASSIGN_OR_RETURN(const auto rotations, upload_all(in, out));
    MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<cuda::DeviceTimer> made, timer_of(rotations));
    // The graph uses the rotations' memory as long as the timer lives.
    const std::shared_ptr<cuda::DeviceTimer> timer = std::move(made);
    return TimeFn([timer, rotations](double seconds) -> Result<std::vector<double>> {
      constexpr int kMinSamples = 5;
      MOESAIC_ASSIGN_OR_RETURN(std::vector<double> us, timer->replay(kMinSamples, seconds));
      for (double& v : us) v /= static_cast<double>(rotations->size());
      return us;
    });
  }

  Result<PassFn> captured(const std::vector<std::vector<ConstTensorView>>& in,
                          const std::vector<std::vector<TensorView>>& out,
                          const std::function<Status()>& all_ready) override {
    const DeviceScope scope(device_.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_ASSIGN_OR_RETURN(const auto rotations, upload_all(in, out));
    MOESAIC_RETURN_IF_ERROR(all_ready());
    MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<cuda::DeviceTimer> made, timer_of(rotations));
    MOESAIC_RETURN_IF_ERROR(all_ready());
    const std::shared_ptr<cuda::DeviceTimer> timer = std::move(made);
    constexpr int kReplays = 8;
    return PassFn([timer, rotations] { return timer->mean_of(kReplays); });
  }

  Result<RunFn> resident(const std::vector<std::vector<ConstTensorView>>& in,
                         const std::vector<std::vector<TensorView>>& out) override {
    const DeviceScope scope(device_.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_ASSIGN_OR_RETURN(const auto rotations, upload_all(in, out));
    return RunFn([rotations, device = device_, enqueue = enqueue_](int rotation) -> Status {
      const DeviceScope here(device.index());
      MOESAIC_RETURN_IF_ERROR(here.status());
      const OnDevice& d = (*rotations)[static_cast<std::size_t>(rotation)];
      MOESAIC_RETURN_IF_ERROR(enqueue(nullptr, rotation, d.in, d.out));
      return cuda::synchronize(nullptr);
    });
  }

 private:
  using Rotations = std::shared_ptr<std::vector<OnDevice>>;
  Result<std::unique_ptr<cuda::DeviceTimer>> timer_of(const Rotations& rotations) const {
    return cuda::DeviceTimer::create(device_.index(), [&](void* stream) -> Status {
      for (std::size_t i = 0; i < rotations->size(); ++i) {
        const OnDevice& d = (*rotations)[i];
        MOESAIC_RETURN_IF_ERROR(enqueue_(stream, static_cast<int>(i), d.in, d.out));
      }
      return {};
    });
  }
  Result<Rotations> upload_all(const std::vector<std::vector<ConstTensorView>>& in,
                               const std::vector<std::vector<TensorView>>& out) const {
    auto rotations = std::make_shared<std::vector<OnDevice>>();
    for (std::size_t i = 0; i < in.size(); ++i) {
      MOESAIC_ASSIGN_OR_RETURN(OnDevice d, OnDevice::make(device_, in[i], out[i]));
      rotations->push_back(std::move(d));
    }
    return rotations;
  }

  Device device_;
  EnqueueFn enqueue_;
};

std::unique_ptr<GpuStage> make_stage(Device device, EnqueueFn enqueue) {
  return std::make_unique<DeviceStage>(device, std::move(enqueue));
}

Status check_gpu(Device device) {
  MOESAIC_RETURN_IF_ERROR(check_device(device));
  return device.is_cuda() ? Status() : Status(StatusCode::kInternal, "a CPU is no GPU");
}

}  // namespace

Result<std::unique_ptr<GpuStage>> make_gpu_gate(Device device, const ConstTensorView& weight,
                                                const ConstTensorView& bias, int copies) {
  MOESAIC_RETURN_IF_ERROR(check_gpu(device));
  GateLinear::Options options;
  options.device = device;
  auto gates = std::make_shared<std::vector<GateLinear>>();
  for (int i = 0; i < copies; ++i) {
    MOESAIC_ASSIGN_OR_RETURN(GateLinear gate, GateLinear::create(weight, bias, options));
    gates->push_back(std::move(gate));
  }
  return make_stage(device, [gates](void* stream, int rotation, const auto& in, const auto& out) {
    const GateLinear& gate = (*gates)[static_cast<std::size_t>(rotation) % gates->size()];
    return gate.forward(in[0], out[0], {stream});
  });
}

Result<std::unique_ptr<GpuStage>> make_gpu_router(Device device, const Router::Options& options) {
  MOESAIC_RETURN_IF_ERROR(check_gpu(device));
  Router::Options on_device = options;
  on_device.device = device;
  MOESAIC_ASSIGN_OR_RETURN(Router made, Router::create(on_device));
  const auto router = std::make_shared<Router>(std::move(made));
  return make_stage(device, [router](void* stream, int, const auto& in, const auto& out) {
    Router::Args a;
    a.router_logits = in[0];
    a.topk_ids = out[0];
    a.topk_weights = out[1];
    a.stream = {stream};
    return router->select_experts(a);
  });
}

Result<std::unique_ptr<GpuStage>> make_gpu_experts(const ExpertsBackend& backend,
                                                   const MoeProblem& problem, ExpertSource& source,
                                                   bool in_kernel) {
  MOESAIC_RETURN_IF_ERROR(check_gpu(problem.device));
  struct State {
    std::vector<std::unique_ptr<Experts>> copies;
    DeviceTensor workspace;
    std::vector<ModularKernel> kernels;  // then the copies are in them
  };
  auto state = std::make_shared<State>();
  std::int64_t held = 0;
  do {
    MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<Experts> experts, backend.create(problem, source));
    held += experts->weight_bytes();
    state->copies.push_back(std::move(experts));
  } while (held < kPastTheCache && state->copies.size() < 8);
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes,
                           backend.workspace_size(problem, problem.max_tokens));
  MOESAIC_ASSIGN_OR_RETURN(state->workspace,
                           DeviceTensor::uninitialized(problem.device, DType::kU8, {bytes}));
  if (in_kernel) {
    ModularKernel::Options options;
    options.max_tokens = problem.max_tokens;
    options.own_workspace = false;
    for (std::unique_ptr<Experts>& experts : state->copies) {
      MOESAIC_ASSIGN_OR_RETURN(auto rows, make_local_prepare_finalize(problem));
      MOESAIC_ASSIGN_OR_RETURN(
          ModularKernel kernel,
          ModularKernel::create(problem, std::move(rows), std::move(experts), options));
      state->kernels.push_back(std::move(kernel));
    }
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t all,
                             state->kernels.front().workspace_size(problem.max_tokens));
    MOESAIC_ASSIGN_OR_RETURN(state->workspace,
                             DeviceTensor::uninitialized(problem.device, DType::kU8, {all}));
    return make_stage(
        problem.device, [state](void* stream, int rotation, const auto& in, const auto& out) {
          ModularKernel::Args a;
          a.hidden_states = in[0];
          a.topk_ids = in[1];
          a.topk_weights = in[2];
          a.output = out[0];
          a.workspace = state->workspace.span();
          return state->kernels[static_cast<std::size_t>(rotation) % state->kernels.size()].enqueue(
              {stream}, a);
        });
  }
  return make_stage(
      problem.device, [state](void* stream, int rotation, const auto& in, const auto& out) {
        ExpertsArgs a;
        a.hidden_states = in[0];
        a.topk_ids = in[1];
        a.topk_weights = in[2];
        a.output = out[0];
        a.workspace = state->workspace.span();
        a.stream = {stream};
        return state->copies[static_cast<std::size_t>(rotation) % state->copies.size()]->run(a);
      });
}

Result<std::unique_ptr<GpuStage>> make_gpu_layer(const FusedMoE& layer) {
  const FusedMoE* const p = &layer;
  return make_stage(layer.device(), [p](void* stream, int, const auto& in, const auto& out) {
    FusedMoE::Args a;
    a.hidden_states = in[0];
    a.output = out[0];
    if (in.size() == 2) a.router_logits = in[1];
    if (in.size() == 3) {
      a.topk_ids = in[1];
      a.topk_weights = in[2];
    }
    if (out.size() > 1) {
      a.trace.topk_ids = out[1];
      a.trace.topk_weights = out[2];
    }
    return p->enqueue({stream}, a);
  });
}

Result<Ceilings> measure_gpu_ceilings(Device device, bool fp8) {
  static std::map<std::pair<int, bool>, Ceilings> done;
  const auto found = done.find({device.index(), fp8});
  if (found != done.end()) return found->second;
  MOESAIC_ASSIGN_OR_RETURN(const cuda::DeviceCeilings measured,
                           cuda::measure_device_ceilings(device.index(), fp8));
  return done[{device.index(), fp8}] = {measured.read_gbps, measured.gflops};
}

std::string gpu_name(Device device) {
  for (const CudaDeviceInfo& d : query_cuda().devices) {
    if (d.index == device.index()) return d.name;
  }
  return "";
}

}  // namespace moesaic::tool
