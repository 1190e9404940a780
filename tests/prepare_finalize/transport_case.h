// Ranks as threads, each with some experts and some rows, that run one ModularKernel over a
// transport.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "support/experts_run.h"

namespace moesaic::test {

enum class Transport { kAllToAll, kGather, kBatched };
inline constexpr Transport kTransports[] = {Transport::kAllToAll, Transport::kGather,
                                            Transport::kBatched};
const char* transport_name(Transport transport);

struct TransportSetup {
  Transport transport = Transport::kAllToAll;
  ExpertPlacement placement = ExpertPlacement::kLinear;
  std::string backend{};  // empty: the first that accepts
  bool quantize_before_dispatch = true;
  DType combine_dtype = DType::kF32;
  std::int64_t max_tokens = 16;  // per rank
  int calls_in_flight = 1;
  int repeats = 2;  // calls, with poisoned workspaces
  // Changes what one rank passes to the kernel, before the first call only.
  std::function<void(int rank, ModularKernel::Args&)> spoil{};
};

// One rank's half of a case: its experts behind a transport.
class RankKernel {
 public:
  // Owns what the kernel's arguments point to. Fails as making the transport or the kernel does.
  static Result<std::unique_ptr<RankKernel>> create(const StandardCase& c,
                                                    const TransportSetup& setup,
                                                    std::shared_ptr<Communicator> communicator);
  const ModularKernel& kernel() const { return *kernel_; }
  // Of a kernel with one call in flight; with more the kernel has its own.
  void poison_workspace();
  // Rows [first, first + rows) of the case and of an output [M, H] F32.
  ModularKernel::Args args(const StandardCase& c, std::int64_t first, std::int64_t rows,
                           Tensor& output) const;

 private:
  std::vector<std::int32_t> map_;
  std::unique_ptr<ModularKernel> kernel_;
  std::unique_ptr<Tensor> workspace_;
};

struct RankRun {
  std::vector<Status> calls;    // one per repeat
  std::int64_t bytes_sent = 0;  // of the last call
  std::int64_t rows = 0;        // of this rank
};
struct TransportRun {
  Tensor output;  // [M, H] F32: the rows of all ranks, poisoned where a call failed
  std::vector<RankRun> ranks;
};
// Rank r computes the r-th stretch of the case's rows.
TransportRun run_transport(const StandardCase& c, const std::vector<std::int64_t>& counts,
                           const TransportSetup& setup);

}  // namespace moesaic::test
