#include "ceilings.h"

#include <map>
#include <utility>

#include "cpu/ceilings.h"
#include "cpu/tiers.h"

namespace moesaic::tool {
namespace {

Ceilings measure(bool narrow, int threads) {
  static std::map<std::pair<bool, int>, Ceilings> done;
  const auto found = done.find({narrow, threads});
  if (found != done.end()) return found->second;
  Ceilings ceilings;
  const auto kernels = cpu::current_kernels();
  if (kernels.ok()) {
    const auto measured = cpu::measure_ceilings(
        **kernels, narrow ? (*kernels)->narrow_operand : cpu::OperandKind::kF32, threads);
    if (measured.ok()) ceilings = {measured->read_gbps, measured->gflops};
  }
  done[{narrow, threads}] = ceilings;
  return ceilings;
}

}  // namespace

Ceilings measure_ceilings(int threads) { return measure(true, threads); }
Ceilings measure_ceilings_f32(int threads) { return measure(false, threads); }

}  // namespace moesaic::tool
