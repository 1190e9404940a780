// The k largest of a stream of (value, id) pairs, kept sorted: one pass over the experts instead of
// k, because after a few dozen of them almost every value loses its first comparison.
#pragma once

#include <cstdint>

#include "core/fault.h"

namespace moesaic::router {

class TopKList {
 public:
  // `values` and `ids` have room for k entries; they hold the result, largest first.
  TopKList(std::int64_t k, float* values, std::int32_t* ids) : k_(k), values_(values), ids_(ids) {}

  // Offers values[e] for e in [begin, end), ascending. Ids must ascend over all calls: an equal
  // value then stays behind the smaller id. No value may be NaN; -infinity is an ordinary value, so
  // that k distinct ids come out whenever k were offered.
  void offer(const float* values, std::int64_t begin, std::int64_t end) {
    if (MOESAIC_FAULT(router_ties_to_higher_id)) return offer_ties_high(values, begin, end);
    for (std::int64_t e = begin; e < end; ++e) {
      const float v = values[e];
      if (count_ == k_ && !(v > values_[k_ - 1])) continue;
      std::int64_t at = count_ < k_ ? count_++ : k_ - 1;
      for (; at > 0 && v > values_[at - 1]; --at) {
        values_[at] = values_[at - 1];
        ids_[at] = ids_[at - 1];
      }
      values_[at] = v;
      ids_[at] = static_cast<std::int32_t>(e);
    }
  }

 private:
  void offer_ties_high(const float* values, std::int64_t begin, std::int64_t end) {
    for (std::int64_t e = begin; e < end; ++e) {
      if (count_ == k_ && !(values[e] >= values_[k_ - 1])) continue;
      std::int64_t at = count_ < k_ ? count_++ : k_ - 1;
      for (; at > 0 && values[e] >= values_[at - 1]; --at) {
        values_[at] = values_[at - 1];
        ids_[at] = ids_[at - 1];
      }
      values_[at] = values[e];
      ids_[at] = static_cast<std::int32_t>(e);
    }
  }

  std::int64_t k_;
  std::int64_t count_ = 0;
  float* values_;
  std::int32_t* ids_;
};

}  // namespace moesaic::router
