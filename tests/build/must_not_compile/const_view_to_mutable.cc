// A view of constant memory never becomes a writable one.
// EXPECT: no (viable|known) conversion|could not convert|cannot convert
#include "moesaic/tensor.h"

void write(moesaic::TensorView out);
void read(moesaic::ConstTensorView in);

void caller(const moesaic::Tensor& tensor) {
#ifdef CONTROL
  read(tensor.view());
#else
  write(tensor.view());
#endif
}
