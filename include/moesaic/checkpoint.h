// Reading model checkpoints: config.json with sharded safetensors, or GGUF files, and the MoE
// layers in them. Files are untrusted input.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moesaic/experts.h"
#include "moesaic/parallel.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

enum class FileAccess : std::uint8_t {
  // Tensors are read by explicit calls either way: a file that shrinks meanwhile is kIo.
  kMmap,  // also maps the files, so that their pages can be given back early
  kCopy,  // takes no address space
};

// Which static activation scales a layer's experts get. Either way they are the same on every rank.
enum class InputScaleRule : std::uint8_t {
  kPerExpert,  // each expert its own, as stored
  kLargest,    // the largest of all experts of the layer, for all of them
};

// The tensors of one MoE layer that belong to no expert. Absent tensors are not present().
struct MoeLayerTensors {
  Tensor gate_weight;              // [E (+ zero experts), H], BF16, F16 or F32 as stored
  Tensor gate_bias;                // [E], router linear bias (gpt-oss), as stored
  Tensor e_score_correction_bias;  // [E (+ zero experts)] F32 (widened if stored narrower)
  // RoutingMethod::kHash: [vocabulary, k] I32, the experts of each token; a layer looks up its
  // FusedMoE::Args::input_ids here.
  Tensor hash_table;
  // MoeLayerSpec::input_norm_eps > 0; gate_weight then holds the router's scales too, in F32.
  Tensor experts_norm_weight;  // [H] F32
  Tensor expert_scale;         // [E] F32, RoutingSpec::has_expert_scale
  Tensor shared_gate_weight;   // [1, H], Qwen2-MoE
};

// A layer as load_layer would give it, known without its weights.
struct MoeLayerFormat {
  MoeLayerSpec spec;
  Scheme shared_quant;              // MoeLayerWeights::shared_quant; spec.quant without one
  DType gate_dtype = DType::kBF16;  // of MoeLayerTensors::gate_weight
};

// Called from time to time during a long load with the bytes done so far and the total.
// Must not throw.
using ProgressFn = std::function<void(std::int64_t done_bytes, std::int64_t total_bytes)>;

// A layer's weights, ready for a backend: small tensors loaded, experts streamed one at a time.
struct MoeLayerWeights {
  MoeLayerSpec spec;  // intermediate_size is still the full I
  MoeLayerTensors tensors;
  // Local experts of the parallel configuration, or tensor-parallel slices of all.
  std::unique_ptr<ExpertSource> experts;
  // The shared expert, expert 0 of its source: w13 [2S, H], w2 [H, S] and what its scheme, which may
  // differ from the routed experts' (spec.quant), has beside them. Null without one.
  std::unique_ptr<ExpertSource> shared;
  Scheme shared_quant;
};

class Checkpoint {
 public:
  struct Options {
    FileAccess access = FileAccess::kMmap;
    InputScaleRule input_scales = InputScaleRule::kPerExpert;
  };
  // Opens a folder with config.json and safetensors, or a GGUF file (of a split model the first
  // part). Reads headers only. Refuses (naming file and field) what is malformed; unknown families
  // are kUnsupported with the nearest known model_type or architecture.
  static Result<Checkpoint> open(const std::string& directory, const Options& options);
  static Result<Checkpoint> open(const std::string& directory) {
    return open(directory, Options{});
  }

  const std::string& model_type() const;
  // MoE layers in ascending order.
  std::span<const MoeLayerSpec> layers() const;
  // kNotFound lists the MoE layers that exist.
  Result<MoeLayerSpec> layer(int index) const;
  // Bytes of all tensors of the layer's MoE block, as stored; 0 for a layer that is not MoE.
  std::int64_t layer_bytes(int index) const;
  // Problems that do not stop every layer, in words: missing or unknown tensors, odd shapes,
  // ignored duplicates, experts in layers that the configuration calls dense.
  std::vector<std::string> problems() const;

  // Loads the router's tensors and makes the sources of the experts, which stay valid after this
  // object is gone. Before anything is read every expected tensor is checked: kMissingTensor names
  // up to 8 and the incomplete experts, kInvalidShape and kInvalidDType name tensor, found and
  // needed (exact shapes; plain weights of several types become F32). kUnsupported names
  // unrecognised tensors in the block and in a shared expert beside it, kCorruptFile where they
  // contradict the configuration or each other (an expert too many, a weight under two spellings),
  // kAmbiguousFormat a layer that is stored twice. kInvalidArgument: intermediate_size does not
  // divide by tp_size, or into whole FP8 blocks (MXFP4 need not: every rank has rows for
  // ceil(I / 32 / tp_size) groups of 32, the last ranks fewer groups or none and zeros instead).
  // Values are checked as they are read: kCorruptFile for FP8 NaN codes and for scales that are not
  // finite and > 0. Scales of integer groups may be negative (kUnsupported with FP8 activations),
  // those of blocks, rows and groups 0 where all of their weights are.
  // Experts follow `parallel`: tensor-parallel slices of I (w2_bias on rank 0, zeros elsewhere) or
  // this rank's share of the experts. The router is whole on every rank, and so is the shared expert,
  // unless cut_shared says that it is cut as RankOptions::cut_shared has it.
  // Gate and up read one row: where they have static activation scales of their own the larger is
  // both's, and a warning goes to the log sink (compressed-tensors: kCorruptFile beyond 1e-5). One
  // also says what MoeLayerSpec::quant_note has.
  // Memory while streaming: one expert's canonical weights, plus one projection where the file
  // stores them transposed. Biases and correction bias arrive as F32.
  // Without include_gate the gate's weight, bias and input scale (not the selection bias) are not
  // read and need not be there.
  Result<MoeLayerWeights> load_layer(int index, const ParallelConfig& parallel,
                                     const ProgressFn& progress = {}, bool include_gate = true,
                                     bool cut_shared = false) const;

  // The checks of load_layer without its reading: every expected tensor present, in shape and
  // dtype, nothing unknown, a quantisation that is known, sizes that divide. Of values only those
  // are read that decide the scheme (scales of a whole tensor, input scales, group indices). Errors
  // as load_layer.
  Result<MoeLayerFormat> check_layer(int index, const ParallelConfig& parallel = {},
                                     bool include_gate = true, bool cut_shared = false) const;

  // Any tensor by name, copied (golden files, hidden states). kNotFound names the nearest.
  Result<Tensor> read_tensor(const std::string& name) const;

  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

 private:
  friend class WeightLoader;  // weight_loader.h: what the files say of a layer
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// A single safetensors file, for hidden states and golden outputs. Opening reads the header only
// and validates it in full: kCorruptFile, kLimitExceeded (sizes beyond 64 bits, header above 10^8
// bytes), kNotFound, kIo. Reading copies; kNotFound names the nearest tensor, kLimitExceeded
// refuses rank > kMaxRank, kIo also when the file shrank meanwhile.
class TensorFile {
 public:
  static Result<TensorFile> open(const std::string& path, FileAccess access = FileAccess::kMmap);
  std::vector<std::string> names() const;  // in file order
  bool contains(const std::string& name) const;
  Result<Tensor> read(const std::string& name) const;
  TensorFile(TensorFile&&) noexcept;
  TensorFile& operator=(TensorFile&&) noexcept;
  ~TensorFile();

 private:
  struct Impl;
  explicit TensorFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct NamedTensor {
  std::string name;
  ConstTensorView tensor;  // contiguous
};
// Writes a safetensors file in the reference writer's order (wider types first, then by name), with
// `metadata` (sorted by key) as its __metadata__ when not empty. Atomic: a temporary file in the
// same folder is renamed only when complete; a failure leaves nothing behind and an older file
// intact. A symbolic link is followed and stays one; a character device, a pipe or an open
// descriptor (/dev/stdout, /dev/fd/3) is written through. The bytes depend on the arguments only.
// kInvalidArgument for duplicate, empty, reserved or non-UTF-8 names, kInvalidLayout for a tensor
// that is not contiguous, kLimitExceeded for a header above 10^8 bytes, kIo.
Status write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                         std::span<const std::pair<std::string, std::string>> metadata = {});

}  // namespace moesaic
