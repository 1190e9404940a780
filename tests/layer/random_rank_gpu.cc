#include "layer/random_rank_gpu.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "moesaic/device_tensor.h"
#include "support/random_cases.h"

namespace moesaic::test {
namespace {

std::atomic<std::int64_t> replays{0};

// Everything of a call on the device. Ranks may share one, and nothing is made or freed there while
// another rank's kernels wait.
class GpuCall {
 public:
  GpuCall(const FusedMoE& layer, const RankRows& rows, bool inplace)
      : layer_(layer), rows_(rows), inplace_(inplace && rows.output == rows.x.dtype) {
    const Device device = layer.device();
    ok(cudaSetDevice(device.index()), "device");
    ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    // Rows that lie apart would be copied to memory that is made in the call.
    Tensor x = Tensor::uninitialized(rows.x.dtype, rows.x.shape).value();
    const std::int64_t row = rows.x.dim(1) * dtype_bits(rows.x.dtype) / 8;
    for (std::int64_t t = 0; t < rows.x.dim(0); ++t) {
      const std::byte* const from = static_cast<const std::byte*>(rows.x.data);
      const std::int64_t pitch = rows.x.strides[0] * dtype_bits(rows.x.dtype) / 8;
      std::memcpy(x.data() + t * row, from + t * pitch, static_cast<std::size_t>(row));
    }
    x_ = copy(x.view());
    logits_ = copy(rows.logits.view());
    weights_ = copy(rows.weights.view());
    ids_ = copy(rows.ids.view());
    input_ids_ = copy(rows.input_ids.view());
    padding_ = copy(rows.padding.view());
    output_ = DeviceTensor::uninitialized(device, rows.output, rows.want.shape()).value();
    shared_ = DeviceTensor::uninitialized(device, rows.output, rows.want.shape()).value();
    FusedMoE::Args& a = args_;
    a.hidden_states = std::as_const(inplace_ ? output_ : x_).view();
    a.router_logits = view(logits_, rows.logits.view());
    a.topk_weights = view(weights_, rows.weights.view());
    a.topk_ids = view(ids_, rows.ids.view());
    a.input_ids = view(input_ids_, rows.input_ids.view());
    a.padding_mask = view(padding_, rows.padding.view());
    a.output = output_.view();
    if (rows.apart) a.shared_output = shared_.view();
    // The first work of a stream may wait for the kernels of others, of no rows too.
    first_ = DeviceTensor::uninitialized(device, DType::kU8, {256}).value();
    ok(cudaMemsetAsync(first_.data(), 0, 256, stream_), "first work");
    finish();
  }
  GpuCall(const GpuCall&) = delete;
  GpuCall& operator=(const GpuCall&) = delete;
  ~GpuCall() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
    (void)cudaStreamDestroy(stream_);
  }

  const std::string& wrong() const { return wrong_; }
  void enqueue() {
    prepare();
    ok(layer_.enqueue({stream_}, args_), "enqueue");
  }
  // False where the call is refused because it cannot be captured.
  bool capture() {
    ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin capture");
    const Status status = layer_.enqueue({stream_}, args_);
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    if (!status.ok()) {
      (void)cudaGetLastError();
      if (status.code() != StatusCode::kUnsupported) ok(status, "capture");
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      return false;
    }
    ok(ended, "end capture");
    ok(cudaGraphInstantiate(&exec_, graph, 0), "instantiate");
    ok(cudaGraphUpload(exec_, stream_), "upload");
    finish();
    (void)cudaGraphDestroy(graph);
    return true;
  }
  void replay() {
    prepare();
    ok(cudaGraphLaunch(exec_, stream_), "launch");
  }
  void finish() { ok(cudaStreamSynchronize(stream_), "finish"); }
  void look(const CheckRows& check) {
    finish();
    if (!layer_.health().ok()) ok(layer_.health(), "health");
    Tensor output = Tensor::uninitialized(rows_.output, rows_.want.shape()).value();
    Tensor shared = Tensor::uninitialized(rows_.output, rows_.want.shape()).value();
    ok(copy_tensor(std::as_const(output_).view(), output.view(), {stream_}), "output");
    ok(copy_tensor(std::as_const(shared_).view(), shared.view(), {stream_}), "shared output");
    if (wrong_.empty()) ok(layer_.maybe_all_reduce(output.view()), "sum");
    if (wrong_.empty()) check(output, shared);
  }

 private:
  void ok(const Status& status, const char* what) {
    if (!status.ok() && wrong_.empty()) wrong_ = fmt::format("{}: {}", what, status.to_string());
  }
  void ok(cudaError_t error, const char* what) {
    if (error != cudaSuccess && wrong_.empty()) {
      wrong_ = fmt::format("{}: {}", what, cudaGetErrorString(error));
    }
  }
  DeviceTensor copy(const ConstTensorView& from) const {
    return from.present() ? DeviceTensor::copy_of(from, layer_.device()).value() : DeviceTensor();
  }
  static ConstTensorView view(const DeviceTensor& t, const ConstTensorView& host) {
    return host.present() ? t.view() : ConstTensorView();
  }
  // No numbers, or the rows where they are overwritten.
  void prepare() {
    const auto bytes = static_cast<std::size_t>(output_.bytes());
    if (bytes == 0) return;
    ok(inplace_
           ? cudaMemcpyAsync(output_.data(), x_.data(), bytes, cudaMemcpyDeviceToDevice, stream_)
           : cudaMemsetAsync(output_.data(), 0xFF, bytes, stream_),
       "prepare");
    ok(cudaMemsetAsync(shared_.data(), 0xFF, bytes, stream_), "prepare");
  }

  const FusedMoE& layer_;
  const RankRows& rows_;
  bool inplace_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  DeviceTensor x_, logits_, weights_, ids_, input_ids_, padding_, output_, shared_, first_;
  FusedMoE::Args args_;
  std::string wrong_;
};

}  // namespace

bool enqueue_takes(const RandomRanks& c, const RankCall& call) {
  return c.options.device.is_cuda() &&
         std::all_of(call.sets.begin(), call.sets.end(), [&](const RankRows& r) {
           return r.x.dtype == DType::kBF16 && r.output != DType::kF16 &&
                  !(r.apart && r.output == DType::kBF16 && c.options.ranks.cut_shared) &&
                  r.x.dim(0) <= c.options.max_tokens;
         });
}

namespace {

std::string enqueue_call(const FusedMoE& layer, const RankRows& rows, bool inplace,
                         Communicator& world, Rng& same, Rng& own, const CheckRows& check) {
  GpuCall call(layer, rows, inplace);
  const auto meet = [&](const char* why) {
    const Status status = call.wrong().empty() ? world.barrier(why) : Status();
    return status.ok() ? call.wrong() : status.to_string();
  };
  std::string wrong = meet("made");
  if (!wrong.empty()) return wrong;
  const bool windows = layer.summary().find("through peer windows") != std::string::npos;
  bool captured = false;
  if (chance(same, 0.7)) {
    captured = call.capture();
    if (captured != windows) return fmt::format("captured: {}, {}", captured, layer.summary());
    wrong = meet("captured");
    if (!wrong.empty()) return wrong;
  }
  // Some ranks replay what others put on their stream.
  for (std::int64_t n = same.integer(1, 4); n > 0 && call.wrong().empty(); --n) {
    if (captured && chance(own, 0.6)) {
      call.replay();
      ++replays;
    } else {
      call.enqueue();
    }
    call.look(check);
  }
  return meet("done");
}

}  // namespace

std::string enqueue_rows(const FusedMoE& layer, const RankRows& rows, bool inplace,
                         Communicator& world, Rng& same, Rng& own, const CheckRows& check) {
  std::string wrong = enqueue_call(layer, rows, inplace, world, same, own, check);
  if (!wrong.empty()) return wrong;
  // Nobody goes on while another frees what it had.
  const Status status = world.barrier("freed");
  return status.ok() ? "" : status.to_string();
}

std::int64_t replayed_graphs() { return replays; }

}  // namespace moesaic::test
