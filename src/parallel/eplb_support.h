// What the files of the load balancer share, and the two steps of its algorithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moesaic::eplb {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// n items into m bins of n/m items each. n == m: item i goes to bin i. Otherwise items by
// descending weight (ties: lower index first) go to the lightest bin that is not full (ties: lower
// bin). Greedy, not optimal.
struct Packing {
  std::vector<std::int32_t> bin;   // [n]
  std::vector<std::int32_t> rank;  // [n] position inside the bin, in order of arrival
};
// m divides n, every weight is finite and >= 0. O(n log n + n m).
Packing pack(std::span<const double> weights, std::int64_t num_bins);

// One copy of each of n items, then N - n times one more of the item with the largest weight /
// copies (ties: lower index): the least possible maximum of weight / copies.
struct Replication {
  std::vector<std::int32_t> physical_to_logical;  // [N]
  std::vector<std::int32_t> replica;              // [N] which copy of its item
  std::vector<std::int32_t> count;                // [n]
};
// N >= n >= 1, weights as above.
Replication replicate(std::span<const double> weights, std::int64_t num_physical);

}  // namespace moesaic::eplb
