// Weights handed over tensor by tensor, by an engine with a weight loop of its own: each tensor under
// its checkpoint's name, whole, in any order. What names, shapes, scales and slices mean is decided
// by the rules that read files (checkpoint.h); the result has the bits that a file would give.
// Source: docs/spec/checkpoints.md sections 3 to 6.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/expert_storage.h"
#include "moesaic/parallel.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

namespace checkpoint {
struct ModelConfig;
}  // namespace checkpoint

// How the tensors of a layer's experts are called, for models of no known family.
struct ExpertNames {
  std::string block = "mlp";  // what all names begin with: "model.layers.3.mlp"
  // Modules inside the block; "{e}" is the number of the expert. Fused storages have no `up`, and
  // `gate` is gate and up; experts without a gate have no `gate`.
  std::string gate = "experts.{e}.gate_proj";
  std::string up = "experts.{e}.up_proj";
  std::string down = "experts.{e}.down_proj";
  ExpertStorage storage = ExpertStorage::kPerExpert;
  // Behind a module's name, for formats that leave it to the family: plain weights, FP8 blocks,
  // gpt-oss' MXFP4 ("_blocks", "_scales"). The others' tensors have names of their own
  // (".weight_packed", ".qweight" ...).
  std::string weight_suffix = ".weight";
  std::string scale_suffix = ".weight_scale_inv";
  std::string bias_suffix = "_bias";  // MoeLayerSpec::has_expert_bias; stacked storages
};

// Where the caller's names differ from the checkpoint's: `from`, at the beginning of a name or
// behind a dot, becomes `to`, once per rule and name, rules in order. An empty `from` puts `to` in
// front of every name.
struct NameReplacement {
  std::string from, to;  // {"base_layer.", ""}, {"transformer.", "model."}
};

// One layer's weights on their way. Not thread-safe: one call at a time. Memory: of every tensor
// that was pushed its header, and the bytes that this rank's experts are made of, as stored; of
// tensors of all experts the rank's share, of tensor-parallel slices the rows and columns that it
// reads. Kept whole are words of integers (GPTQ, AWQ, pack-quantized), GGUF blocks and absmax of
// local experts, scales per row or block and biases of stacked tensors, the shared expert (also
// where it is cut), tensors of the block that the layer turns out not to have, which finish refuses
// by name, and of every expert's the numbers by which all ranks decide alike: static activation
// scales, FP8 scales per tensor, NVFP4 global scales, act-order's group indices.
class WeightLoader {
 public:
  struct Options {
    // Which experts are local, or which slice of each.
    ParallelConfig parallel;
    // [P]: the logical expert in each physical slot, with redundant copies; `parallel` then shares
    // out slots instead of experts. Empty: slot e is expert e. A copy costs no memory here.
    std::vector<std::int32_t> physical_to_logical;
    std::vector<NameReplacement> names;
    // As Checkpoint::Options has it; from_checkpoint too follows this one.
    InputScaleRule input_scales = InputScaleRule::kPerExpert;
    // The caller has router and shared experts in hands of its own: they are not asked for, and
    // load() answers their tensors with false.
    bool experts_only = false;
    // shared is this rank's slice of the shared expert, as Checkpoint::load_layer has it.
    bool cut_shared = false;
    // Descriptions of the quantisation beside config.json, (name, contents): hf_quant_config.json,
    // quantize_config.json, quant_config.json. With from_config.
    std::vector<std::pair<std::string, std::string>> side_files;
  };

  // Of the layer `index` of a model: config.json's text. Family, names, sizes and formats are read
  // from it as Checkpoint::open does, with its errors.
  static Result<WeightLoader> from_config(std::string_view config_json, int index,
                                          const Options& options);
  // As the files of this checkpoint describe it, GGUF too; none of their tensors is read.
  static Result<WeightLoader> from_checkpoint(const Checkpoint& checkpoint, int index,
                                              const Options& options);
  // Of a layer described by hand: experts only, whatever the options say.
  //   spec                 sizes, activation, has_expert_bias; spec.quant is not looked at
  //   quantization_config  JSON as in config.json; empty: the weights are plain
  static Result<WeightLoader> from_spec(const MoeLayerSpec& spec, const ExpertNames& names,
                                        std::string_view quantization_config,
                                        const Options& options);

  // Whether load() looks at a tensor of this name; else it answers false, whatever the tensor is.
  bool looks_at(std::string_view name) const;
  // Takes one tensor, copying what this rank needs of it. `tensor` is whole and contiguous, in host
  // memory or on a GPU, where what writes it is done; it may be gone afterwards. From a GPU nothing
  // is copied unless some of it is kept, and then the whole.
  //   true   kept
  //   false  not local: of another rank's expert, of another layer or part of the model, or of no
  //          use. Its name and form were checked all the same where they are this layer's
  // Errors, after which nothing has changed: kInvalidArgument for a name pushed twice, kInvalidShape
  // and kInvalidDType (tensor, found, needed), kInvalidLayout, kOutOfMemory, of a tensor on a GPU
  // those of copy_tensor. What only all tensors
  // together tell (missing ones, two spellings, a block size) is said by finish.
  Result<bool> load(std::string_view name, ConstTensorView tensor);
  // The same of a tensor of a GGUF file, whose type has this number there: blocks are U8 [..., bytes
  // of a row], numbers (F32, F16, BF16 ...) what they are, or such bytes. kUnsupported names the types
  // that are read.
  Result<bool> load(std::string_view name, ConstTensorView tensor, std::uint32_t ggml_type);
  // All of them in order; the names that were kept. Stops at the first error.
  Result<std::vector<std::string>> load_weights(std::span<const NamedTensor> tensors);

  // Tensors that finish would still miss, in the order of the layer's plan.
  Result<std::vector<std::string>> missing() const;
  // That are held now.
  std::int64_t bytes() const;

  // The layer's weights, as Checkpoint::load_layer of a file with these tensors for this
  // `parallel` and `cut_shared` returns them: experts->expert(i) is local slot i. Takes everything
  // out of this object, which takes no more; after an error it is as before, and what was missing
  // can follow. kMissingTensor lists up to 8 and counts incomplete experts; the other errors are
  // load_layer's.
  // With experts_only the tensors of the router are not present and `shared` is null.
  Result<MoeLayerWeights> finish();

  WeightLoader(WeightLoader&&) noexcept;
  WeightLoader& operator=(WeightLoader&&) noexcept;
  ~WeightLoader();

 private:
  struct Impl;
  explicit WeightLoader(std::unique_ptr<Impl> impl);
  static Result<WeightLoader> make(checkpoint::ModelConfig config, int index,
                                   const Options& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
