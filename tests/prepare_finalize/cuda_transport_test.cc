// The GPU's transports behind ModularKernel: two ranks as threads of this process, on one GPU, have
// the bits of one rank with all experts. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/device_tensor.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/parallel.h"
#include "support/cuda_device.h"
#include "support/experts_run.h"
#include "support/hang_guard.h"

namespace moesaic {
namespace {

using test::StandardCase;

constexpr Device kTransportGpu = Device::cuda(0);
constexpr std::int64_t kMostRows = 16;  // of a rank

// The experts of a case from `first` on.
class ExpertsFrom final : public ExpertSource {
 public:
  ExpertsFrom(const StandardCase& c, std::int64_t first)
      : all_(make_stacked_source(c.weights.view())), first_(first) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override { return all_->expert(first_ + e); }

 private:
  std::unique_ptr<ExpertSource> all_;
  std::int64_t first_;
};

// Two experts a token: a row's result is one sum of two numbers, whoever adds them.
StandardCase case_for(const std::string& quant, std::int64_t tokens, std::int64_t hidden = 0,
                      std::int64_t top_k = 2) {
  MoeProblem problem = test::small_problem(quant);
  problem.top_k = top_k;
  if (hidden > 0) problem.hidden_size = hidden;
  const DType rows = problem.activation_dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  StandardCase c = test::make_case(71, problem, tokens, rows, 0.2);
  c.problem.device = kTransportGpu;
  return c;
}

DeviceTensor rows_of(const Tensor& all, std::int64_t first, std::int64_t rows) {
  const std::int64_t columns = all.shape()[1], bytes = dtype_bits(all.dtype()) / 8;
  if (rows == 0) {
    return DeviceTensor::uninitialized(kTransportGpu, all.dtype(), {0, columns}).value();
  }
  const ConstTensorView part(all.data() + first * columns * bytes, all.dtype(), {rows, columns});
  return DeviceTensor::copy_of(part, kTransportGpu).value();
}

Status run_captured(const ModularKernel& kernel, ModularKernel::Args args) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  args.stream.handle = stream;
  const Status status = kernel.run(args);
  static_cast<void>(cudaStreamEndCapture(stream, &graph));
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  static_cast<void>(cudaStreamDestroy(stream));
  static_cast<void>(cudaGetLastError());
  return status;
}

// Runs rows [first, first + rows) of the case and writes them to `output` [M, H] of the host, asking
// for results of `dtype`.
Status run_rows(const ModularKernel& kernel, const StandardCase& c, std::int64_t first,
                std::int64_t rows, const DeviceTensor& map, Tensor& output, DType dtype,
                bool captured = false) {
  const std::int64_t hidden = c.problem.hidden_size;
  const DeviceTensor x = rows_of(c.hidden_states, first, rows);
  const DeviceTensor ids = rows_of(c.routing.ids, first, rows);
  const DeviceTensor weights = rows_of(c.routing.weights, first, rows);
  DeviceTensor out = DeviceTensor::uninitialized(kTransportGpu, dtype, {rows, hidden}).value();
  ModularKernel::Args a;
  a.hidden_states = x.view();
  a.topk_ids = ids.view();
  a.topk_weights = weights.view();
  if (map.bytes() > 0) {
    a.expert_map = {map.view().as<std::int32_t>(), static_cast<std::size_t>(map.bytes() / 4)};
  }
  a.output = out.view();
  const Status status = captured ? run_captured(kernel, a) : kernel.run(a);
  if (!status.ok() || rows == 0) return status;
  const std::int64_t row_bytes = hidden * (dtype_bits(output.dtype()) / 8);
  return copy_tensor(out.view(), TensorView(output.data() + first * row_bytes, output.dtype(),
                                            Shape{rows, hidden}));
}

ModularKernel kernel_of(const MoeProblem& problem, ExpertSource& source,
                        std::unique_ptr<PrepareAndFinalize> pf) {
  ModularKernel::Options options;
  options.max_tokens = kMostRows;
  if (problem.format == ActivationFormat::kBatched) {
    options.max_tokens_per_expert = problem.max_tokens;
  }
  return ModularKernel::create(problem, std::move(pf),
                               choose_experts(problem).value()->create(problem, source).value(),
                               options)
      .value();
}

struct GpuSetup {
  std::string row;
  bool quantize_before_dispatch = true;
  std::vector<std::int64_t> counts;                        // rows of each rank
  std::vector<DType> output = {DType::kF32, DType::kF32};  // that each rank asks for
  DType combine_dtype = DType::kF32;
  bool rank_0_is_captured = false;  // its stream is
};

// Statuses of the ranks; `output` [M, H] of all.
std::vector<Status> run_ranks(const StandardCase& c, const GpuSetup& setup, Tensor& output) {
  auto ranks = make_in_process_communicators(2, {.timeout_ms = test::kHangGuardMs}).value();
  std::vector<Status> statuses(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back(
        [&, r,
         comm = std::shared_ptr<Communicator>(std::move(ranks[static_cast<std::size_t>(r)]))] {
          AllToAllOptions options;
          options.parallel.ep_size = options.parallel.dp_size = 2;
          options.parallel.ep_rank = options.parallel.dp_rank = r;
          options.max_tokens_per_rank = kMostRows;
          options.quantize_before_dispatch = setup.quantize_before_dispatch;
          options.combine_dtype = setup.combine_dtype;
          MoeProblem problem = c.problem;
          problem.num_local_experts = problem.num_experts / 2;
          problem.max_tokens = 2 * kMostRows;
          for (const PrepareFinalizeBackend& row : prepare_finalize_catalogue()) {
            if (row.name != setup.row) continue;
            EXPECT_TRUE(row.can_implement(problem, options.parallel).ok());
            ExpertsFrom source(c, r * problem.num_local_experts);
            const ModularKernel kernel =
                kernel_of(problem, source, row.create(problem, comm, options).value());
            EXPECT_EQ(kernel.prepare_finalize().name(), setup.row);
            const std::vector<std::int32_t> map =
                make_expert_map(problem.num_experts, options.parallel).value();
            const ConstTensorView host(reinterpret_cast<const std::byte*>(map.data()), DType::kI32,
                                       {problem.num_experts});
            const DeviceTensor there = DeviceTensor::copy_of(host, kTransportGpu).value();
            const auto i = static_cast<std::size_t>(r);
            for (int repeat = 0; repeat < 2 && statuses[i].ok(); ++repeat) {
              statuses[i] =
                  run_rows(kernel, c, r == 0 ? 0 : setup.counts[0], setup.counts[i], there, output,
                           setup.output[i], r == 0 && setup.rank_0_is_captured);
            }
          }
        });
  }
  for (std::thread& t : threads) t.join();
  return statuses;
}

// With sizes that travel with zeros behind them, or as bf16 (0: one that travels as it is).
TEST(CudaTransport, TwoRanksHaveTheBitsOfOne) {
  REQUIRE_HOPPER();
  struct Form {
    const char* quant;
    std::int64_t hidden;
  };
  for (const auto& [quant, hidden] :
       {Form{"bf16", 0}, {"fp8-block", 0}, {"bf16", 100}, {"fp8-block", 192}, {"fp8-block", 100}}) {
    for (const std::vector<std::int64_t>& counts :
         {std::vector<std::int64_t>{5, 8}, std::vector<std::int64_t>{13, 0}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const StandardCase c = case_for(quant, 13, hidden);
        Tensor want = Tensor::zeros(dtype, c.hidden_states.shape()).value();
        MoeProblem whole = c.problem;
        whole.max_tokens = kMostRows;
        ExpertsFrom source(c, 0);
        const ModularKernel one =
            kernel_of(whole, source, make_local_prepare_finalize(whole).value());
        ASSERT_TRUE(run_rows(one, c, 0, 13, DeviceTensor(), want, dtype).ok());
        for (const char* row : {"cuda_all_to_all", "cuda_all_gather_reduce_scatter"}) {
          for (const bool codes : {true, false}) {
            Tensor got = Tensor::zeros(dtype, c.hidden_states.shape()).value();
            std::memset(got.data(), 0xFF, static_cast<std::size_t>(got.bytes()));
            for (const Status& s : run_ranks(c, {row, codes, counts, {dtype, dtype}}, got)) {
              ASSERT_TRUE(s.ok()) << row << ' ' << quant << ": " << s.to_string();
            }
            EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<std::size_t>(got.bytes())),
                      0)
                << row << ' ' << quant << ' ' << hidden << " codes " << codes << " rows "
                << counts[0] << ' ' << dtype_name(dtype);
          }
        }
      }
    }
  }
}

// The batched format: k results come back and are added up at home, for any k; experts that leave bf16
// lose nothing as bf16. A rank without rows has others'; a slot may have no expert.
TEST(CudaTransport, SlabsOfTwoRanksHaveTheBitsOfOne) {
  REQUIRE_HOPPER();
  struct Form {
    const char* quant;
    std::int64_t hidden;
    bool weight_on_input = false;
  };
  for (const Form& form : {Form{"bf16", 0},
                           {"fp8-block", 0},
                           {"int4-g128", 0},
                           {"f16", 0},
                           {"bf16", 100},
                           {"fp8-block", 192},
                           {"bf16", 0, true}}) {
    StandardCase c = case_for(form.quant, 13, form.hidden, /*top_k=*/3);
    c.problem.format = ActivationFormat::kBatched;
    c.problem.max_tokens = kMostRows;
    c.problem.apply_router_weight_on_input = form.weight_on_input;
    for (const std::int64_t slot : {1, 10, 12, 13, 14}) c.routing.ids.as<std::int32_t>()[slot] = -1;
    if (form.weight_on_input) {
      // One expert a token.
      for (std::int64_t slot = 0; slot < 39; ++slot) {
        if (slot % 3 != 0) c.routing.ids.as<std::int32_t>()[slot] = -1;
      }
    }
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Tensor want = Tensor::zeros(dtype, c.hidden_states.shape()).value();
      ExpertsFrom source(c, 0);
      const ModularKernel one =
          kernel_of(c.problem, source, make_batched_prepare_finalize(c.problem).value());
      ASSERT_TRUE(run_rows(one, c, 0, 13, DeviceTensor(), want, dtype).ok());
      for (const std::vector<std::int64_t>& counts :
           {std::vector<std::int64_t>{5, 8}, std::vector<std::int64_t>{13, 0}}) {
        const bool narrow = choose_experts(c.problem).value()->name == "cuda_sm90";
        for (const DType combine : {DType::kF32, narrow ? DType::kBF16 : DType::kF32}) {
          Tensor got = Tensor::zeros(dtype, c.hidden_states.shape()).value();
          std::memset(got.data(), 0xFF, static_cast<std::size_t>(got.bytes()));
          const GpuSetup setup{"cuda_all_to_all_batched", true, counts, {dtype, dtype}, combine};
          for (const Status& s : run_ranks(c, setup, got)) {
            ASSERT_TRUE(s.ok()) << form.quant << ": " << s.to_string();
          }
          EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<std::size_t>(got.bytes())), 0)
              << form.quant << ' ' << form.hidden << " rows " << counts[0] << ' '
              << dtype_name(dtype) << ' ' << dtype_name(combine);
        }
      }
    }
  }
}

// A rank that refuses by itself does not leave the other one waiting.
TEST(CudaTransport, ARankThatRefusesEndsTheCallOfTheOther) {
  REQUIRE_HOPPER();
  const StandardCase c = case_for("bf16", 8);
  Tensor got = Tensor::zeros(DType::kF32, c.hidden_states.shape()).value();
  GpuSetup setup{"cuda_all_to_all", true, {4, 4}, {DType::kI32, DType::kF32}};
  const std::vector<Status> statuses = run_ranks(c, setup, got);
  EXPECT_EQ(statuses[0].code(), StatusCode::kInvalidDType) << statuses[0].to_string();
  EXPECT_NE(statuses[0].message().find("output: got I32, need"), std::string::npos);
  EXPECT_EQ(statuses[1].code(), StatusCode::kDevice) << statuses[1].to_string();
  EXPECT_NE(statuses[1].message().find("output: got I32"), std::string::npos)
      << statuses[1].to_string();
}

// Nor one that fails in the middle of it: here rank 0's stream cannot be waited for.
TEST(CudaTransport, ARankThatFailsEndsTheCallOfTheOther) {
  REQUIRE_HOPPER();
  for (const std::int64_t hidden : {0, 264}) {
    const StandardCase c = case_for("bf16", 8, hidden);
    Tensor got = Tensor::zeros(DType::kF32, c.hidden_states.shape()).value();
    GpuSetup setup{"cuda_all_to_all", true, {4, 4}};
    setup.rank_0_is_captured = true;
    const std::vector<Status> statuses = run_ranks(c, setup, got);
    EXPECT_EQ(statuses[0].code(), StatusCode::kDevice) << statuses[0].to_string();
    EXPECT_EQ(statuses[1].code(), StatusCode::kDevice) << statuses[1].to_string();
    EXPECT_NE(statuses[1].message().find(statuses[0].message()), std::string::npos)
        << statuses[0].to_string() << "; " << statuses[1].to_string();
  }
}

}  // namespace
}  // namespace moesaic
