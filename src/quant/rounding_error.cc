#include "quant/rounding_error.h"

namespace moesaic {

double rounding_error(const OperandQuant& q) {
  switch (q.dtype) {
    case DType::kF32:
      return 6e-8;
    case DType::kBF16:
      return 0.00166;
    case DType::kF16:
      return 0.00021;
    case DType::kF8E4M3:
      return 0.0266;
    case DType::kF4E2M1:
      return q.scale_format == ScaleFormat::kE4M3 ? 0.0952 : 0.1119;
    case DType::kI8:
    case DType::kU8:
      return 0.0078;
    case DType::kI4:
      return q.scale_format == ScaleFormat::kE4M3 ? 0.1147 : 0.1103;
    default:
      return q.table == CodeTable::kFp4 ? 0.13 : 0.0919;
  }
}

}  // namespace moesaic
