// Where a verb writes its result: what may be overwritten, the mark by which an earlier result of
// ours is known, and stdout as a destination. The one place for `run --output` and `bench --plot`.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "exit_code.h"
#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic::tool {

struct ResultFile {
  enum class Content {
    kLayerOutput,  // safetensors of `run`, known by its __metadata__
    kPlot,         // SVG of `bench`, known by an attribute of its root
  };
  std::string option;  // "--output": begins every message
  std::string path;    // as typed; "-" is stdout
  Content content = Content::kLayerOutput;
  bool force = false;
  std::string model;                // checkpoint that the command reads, or empty
  std::vector<std::string> inputs;  // other files that it reads; empty ones are ignored
};

// The result goes to stdout ("-", /dev/stdout, /dev/fd/1), so that everything else must not.
bool goes_to_stdout(const ResultFile& file);
// Whose fault it is that it cannot be written.
Origin origin_of(const ResultFile& file);
// Whose fault a status of check_result_file is: kIo may be of stdout itself.
Origin origin_of_refusal(const ResultFile& file, const Status& status);

// Everything that can be said before the work is done; writes nothing. Devices and pipes are
// written through and links followed (checkpoint/container/output_file.h). kInvalidArgument: a file that the
// command reads, any file in the model's folder or part of a GGUF model (told by device and inode,
// so through links as well), a new file there under a name that a reader of models looks for; an
// existing file that is neither empty nor a result of the same verb, unless `force`; a terminal for
// tensors, unless `force`; stderr, and stdout where it is the same pipe or file. kIo: what the
// system refuses.
Status check_result_file(const ResultFile& file);

// Checks again, then writes: the whole file or nothing.
Status write_result(const ResultFile& file, std::span<const NamedTensor> tensors);
Status write_result(const ResultFile& file, std::string_view svg);

// Of the root element of every picture.
inline constexpr std::string_view kPlotMark = "data-producer=\"moesaic bench\"";

}  // namespace moesaic::tool
