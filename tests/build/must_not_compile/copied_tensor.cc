// A tensor is moved or viewed; copying megabytes is never implicit.
// EXPECT: deleted|implicitly-deleted
#include <utility>

#include "moesaic/tensor.h"

moesaic::Tensor caller(moesaic::Tensor& tensor) {
#ifdef CONTROL
  return std::move(tensor);
#else
  return moesaic::Tensor(tensor);
#endif
}
