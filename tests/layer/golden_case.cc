#include "layer/golden_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace moesaic::test {
std::vector<Golden> read_golden(const Checkpoint& checkpoint, const std::string& folder) {
  const TensorFile file = TensorFile::open(folder + "/golden.safetensors").value();
  std::vector<Golden> all;
  for (const MoeLayerSpec& spec : checkpoint.layers()) {
    Golden g;
    g.layer = spec.layer;
    g.input = file.read(spec.prefix + ".input").value();
    g.output = file.read(spec.prefix + ".output").value();
    for (const char* name : {".gate.out2", ".router.out2"}) {
      if (file.contains(spec.prefix + name)) g.ids = file.read(spec.prefix + name).value();
    }
    all.push_back(std::move(g));
  }
  return all;
}

Tensor first_rows(const Tensor& source, std::int64_t rows) {
  const Shape shape = {std::min(rows, source.shape()[0]), source.shape()[1]};
  Tensor part = Tensor::uninitialized(source.dtype(), shape).value();
  std::memcpy(part.data(), source.data(), static_cast<std::size_t>(part.bytes()));
  return part;
}

void expect_same_choice(const Tensor& got, const Tensor& want) {
  ASSERT_EQ(got.shape(), want.shape());
  const std::int64_t k = got.shape()[1];
  for (std::int64_t t = 0; t < got.shape()[0]; ++t) {
    const std::int32_t* a = got.as<std::int32_t>() + t * k;
    const std::int32_t* b = want.as<std::int32_t>() + t * k;
    ASSERT_TRUE(std::is_permutation(a, a + k, b, b + k)) << "token " << t;
  }
}

}  // namespace moesaic::test
