// Routing of one row: logits -> k weights and k logical ids, for every method whose rule looks at
// one row at a time. No tensors, threads or allocation here.
#pragma once

#include <cstdint>
#include <vector>

#include "moesaic/spec.h"

namespace moesaic::router {

// What one thread needs for that many rows: 3 ns a logit (2^14 in 50 us), for the size of
// its team (cpu/team.h).
constexpr double route_rows_us(std::int64_t rows, std::int64_t columns) {
  return static_cast<double>(rows) * static_cast<double>(columns) * 3e-3;
}

// Everything a row needs besides its logits, prepared once.
struct RowRouter {
  RoutingSpec spec;                 // validated, grouping possible
  std::vector<float> bias;          // [columns()], empty: none
  std::vector<float> vision_bias;   // [columns()], empty: none
  std::vector<float> expert_scale;  // [columns()], empty: none
  float scale = 1.0F;               // what the weights are multiplied by

  std::int64_t columns() const { return spec.num_experts + spec.num_zero_experts; }
  // Floats of scratch that route() needs.
  std::int64_t scratch_floats() const;

  // weights[k] and ids[k] of one row. `logits` [columns()] is not written. `table_ids` (kHash) are
  // the k ids that the table prescribes, or null: select by score + vision_bias.
  // Returns the summed weight of zero experts, whose slots were turned into id 0, weight 0.
  float route(const float* logits, const std::int32_t* table_ids, float* scratch, float* weights,
              std::int32_t* ids) const;

 private:
  struct Scratch;
  void top_k(const float* logits, const std::vector<float>& selection_bias, const Scratch& scratch,
             float* weights, std::int32_t* ids) const;
  bool grouped_top_k(const float* logits, const Scratch& scratch, float* weights,
                     std::int32_t* ids) const;
  void raw_top_k(const float* logits, const Scratch& scratch, std::int32_t* ids) const;
  void renormalize_and_scale(float* weights) const;
};

}  // namespace moesaic::router
