// Where experts leave the weighted rows of a call's slots for whoever adds them up.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

// [M * k, H] bf16, a row for each pair; or, with a capacity, [capacity, H], where the slot of a pair
// is row row_of_pair[pair], or nowhere (-1).
struct SlotsPlace {
  void* rows = nullptr;                       // null: there is no such place
  const std::int32_t* row_of_pair = nullptr;  // [M * k], not null with a capacity
  // One number on the device: how many pairs have an expert here. With more than the capacity no slot
  // has been written.
  const std::uint32_t* listed = nullptr;
  std::int64_t capacity = 0;  // 0: none
};

}  // namespace moesaic::cuda
