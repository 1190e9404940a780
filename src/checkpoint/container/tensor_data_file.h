// A file of tensors whose places are known: copying tensors, ranges and rectangles out of it. All but
// read_range is made of read_range, so that tensors may also lie elsewhere (pushed_tensors.h).
// Which tensors there are, and where, the container formats say (safetensors.h, gguf.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "checkpoint/container/ggml_types.h"
#include "checkpoint/container/mapped_file.h"
#include "moesaic/checkpoint.h"
#include "moesaic/dtype.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

// One validated tensor: begin <= end <= data bytes and end - begin is exactly the size that dtype
// and shape say.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  int rank = 0;             // as in the file
  Shape shape;              // rank 0 when rank > kMaxRank: such a tensor is listed but not readable
  std::uint64_t begin = 0;  // bytes, relative to the data section
  std::uint64_t end = 0;
  // GGUF block types (and no others): dtype is U8 and the last dimension counts the bytes of a row
  // of blocks, so that rows and whole blocks can be cut out like those of any other tensor.
  quant::GgufType block_type = quant::GgufType::kNone;
  std::uint64_t bytes() const { return end - begin; }
};

// Movable. Reads are thread-safe.
class TensorDataFile {
 public:
  virtual ~TensorDataFile() = default;
  TensorDataFile(TensorDataFile&&) noexcept = default;
  TensorDataFile& operator=(TensorDataFile&&) noexcept = default;

  // What messages call it.
  virtual const std::string& path() const { return file_.path(); }

  // All of the following take an `info` of this file. They copy by explicit reads under either
  // FileAccess, so a file that shrinks meanwhile gives kIo. kLimitExceeded for rank > kMaxRank.

  // The whole tensor; dst.size() must be info.bytes(), else kInvalidArgument.
  Status read(const TensorInfo& info, std::span<std::byte> dst) const;
  // dst.size() bytes from byte `offset` of the tensor; kInvalidArgument beyond its end.
  virtual Status read_range(const TensorInfo& info, std::uint64_t offset,
                            std::span<std::byte> dst) const;
  // A rectangle of the tensor seen as a matrix [product of all leading dimensions, last dimension]
  // (rank 0 and 1: one row): rows [first_row, +num_rows), columns [first_col, +num_cols), written
  // row-major without gaps. So expert e of [E, R, C] is rows [e * R, +R), a tensor-parallel slice
  // of w2 [H, I] a range of columns. kInvalidArgument: outside the tensor or dst.size() is not
  // num_rows * num_cols elements; kInvalidLayout: a sub-byte type whose columns do not fall on
  // bytes.
  Status read_rows(const TensorInfo& info, std::int64_t first_row, std::int64_t num_rows,
                   std::int64_t first_col, std::int64_t num_cols, std::span<std::byte> dst) const;
  // A new tensor with the contents.
  Result<Tensor> read_tensor(const TensorInfo& info) const;

  // Zero-copy bytes, not necessarily aligned; FileAccess::kMmap only (else kUnsupported). The
  // caller accepts SIGBUS when somebody cuts the file meanwhile. Valid while this object lives.
  Result<std::span<const std::byte>> view(const TensorInfo& info) const;
  // After using a large view: takes its pages out of this process's resident memory.
  void drop_residency(const TensorInfo& info) const;

 protected:
  TensorDataFile() = default;
  // `data_offset`: of the data section, from the file's first byte.
  TensorDataFile(MappedFile file, std::uint64_t data_offset);

 private:
  // Are short pieces of rows better read with what lies between them?
  virtual bool reads_whole_rows() const { return true; }

  MappedFile file_;
  std::uint64_t data_offset_ = 0;
};

}  // namespace moesaic::checkpoint
