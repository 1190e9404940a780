// Converting a checkpoint: its routed experts into another number format, everything else as it is,
// in a layout that other engines read.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic {

// fp8-block fp8-channel mxfp8 mxfp4 nvfp4 int4-g128, as the command line calls them.
//   fp8-block    quant_method "fp8", 128x128 blocks, weight_scale_inv F32
//   fp8-channel  compressed-tensors float-quantized, scale per output row, activations per token
//   mxfp8        compressed-tensors mxfp8-quantized, groups of 32, scales rounded up
//   mxfp4        compressed-tensors mxfp4-pack-quantized, groups of 32, scales rounded at 1.75; for
//                gpt-oss its own MXFP4 blocks
//   nvfp4        compressed-tensors nvfp4-pack-quantized; gate and up of an expert share one global
//                scale. Weight-only: a static activation scale needs calibration data
//   int4-g128    compressed-tensors pack-quantized, symmetric, BF16 scales; weight-only
std::span<const std::string_view> convert_schemes();

struct ConvertOptions {
  std::string scheme;  // one of convert_schemes()
  FileAccess access = FileAccess::kMmap;
  int num_threads = 0;  // 0: one per core this process may use; bits do not depend on it
  ProgressFn progress;  // source bytes done and in all
  // Called between pieces of work; true ends the conversion with kIo "interrupted".
  std::function<bool()> should_stop;
  // Lets the result take the place of a folder with files that no conversion wrote.
  bool replace_any_folder = false;
  // Not null: set to whether a failure is the destination's (its rules, or it cannot be written).
  bool* failed_on_output = nullptr;
};

struct ConvertReport {
  struct Layer {
    int layer = -1;
    // |decoded new weights - decoded old| / |old| over all routed experts: of w13 or w2, the larger.
    double rel_l2_weights = 0;
    std::int64_t bytes_in = 0, bytes_out = 0;  // of the routed experts
  };
  std::vector<Layer> layers;
  std::int64_t bytes_in = 0, bytes_out = 0;  // of all tensors
  std::vector<std::string> notes;            // what was not copied as it was, and why
};

// Reads the checkpoint in folder `from` and writes folder `to`: safetensors shards with an index,
// config.json with a new quantization_config, and the other small files of the folder (tokeniser,
// golden file) as they are. Every tensor that is not a routed expert's is copied byte for byte,
// with its name and dtype, quantised or not. Where linears outside the routed experts are
// quantised, quantization_config describes both:
//   FP8 blocks beside fp8-block  the source's own description, which covers the experts as well
//   compressed-tensors           groups for the experts and for what stays; fp8-block then is that
//                                of compressed-tensors (weight_scale)
//   all else                     one description for each part, the source's and the experts',
//                                under "other_modules" and "routed_experts" and without a quant_method:
//                                this library reads it, engines that expect a method refuse it
// moesaic_conversion.json keeps the report.
//
// `to` appears complete or not at all: it is written under the temporary name "<to>.tmp-<process>"
// beside it and renamed. What a killed conversion left under such a name is removed first, if its
// process is gone and it is recognisably one; `notes` say so, and name what looks like one but
// stays. Links in `to` are followed. Memory: two experts of one layer in fp32 and their codes, and
// 4 MiB; independent of the model's number of layers. Deterministic: the same bytes for any number
// of threads.
//
// Errors: kNotFound (scheme, with the nearest name; folders, the one in which `to` is to be made),
// kInvalidArgument (`to` is the model's folder, inside it, or holds it or a file of it; is or holds
// the current folder; is a file, a mount point, or a folder with files that no conversion wrote and
// replace_any_folder is not set), kUnsupported (a GGUF source; sizes that the format cannot cut
// into groups, families whose experts have no layout of their own per expert), kAmbiguousFormat
// (quantised linears that no quantization_config describes), kLimitExceeded (a config.json or index
// that would be too large to be read), and those of reading. All are found before anything is written,
// except, naming layer and expert, NaN and infinite weights (kInvalidArgument) and weights that the
// format would lose (kUnsupported); and kIo.
Result<ConvertReport> convert_checkpoint(const std::string& from, const std::string& to,
                                         const ConvertOptions& options);

// rel_l2_weights of layer `layer` if the checkpoint in this folder was made by convert_checkpoint,
// nothing otherwise. kCorruptFile for a record that is not one.
Result<std::optional<double>> converted_weight_error(const std::string& directory, int layer);

}  // namespace moesaic
