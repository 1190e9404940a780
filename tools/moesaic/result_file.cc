#include "result_file.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "checkpoint/container/output_file.h"
#include "checkpoint/container/safetensors.h"
#include "core/fault.h"

namespace moesaic::tool {
namespace {

namespace fs = std::filesystem;

const std::array<std::pair<std::string, std::string>, 2> kMetadata = {
    {{"content", "layer_output"}, {"producer", "moesaic run"}}};

std::string system_path(const ResultFile& file) {
  return file.path == "-" ? "/dev/stdout" : file.path;
}

const char* verb_of(ResultFile::Content content) {
  return content == ResultFile::Content::kPlot ? "moesaic bench --plot" : "moesaic run";
}

bool same_file(const checkpoint::OutputTarget& target, const std::string& path) {
  struct stat info {};
  return !path.empty() && ::stat(path.c_str(), &info) == 0 && info.st_ino == target.inode &&
         info.st_dev == target.device;
}

// <stem>-00002-of-00003.gguf -> "<stem>-" and "-of-00003.gguf"; else empty.
std::pair<std::string, std::string> gguf_part(const std::string& name) {
  constexpr std::size_t kDigits = 5, kEnd = 14;  // of "-of-00003.gguf"
  if (name.size() < kEnd + kDigits + 1 || !name.ends_with(".gguf")) return {};
  const std::string end = name.substr(name.size() - kEnd);
  const std::string begin = name.substr(0, name.size() - kEnd - kDigits);
  if (!end.starts_with("-of-") || !begin.ends_with('-')) return {};
  return {begin, end};
}

// Whether the target is a file in the model's folder, or a part of a GGUF model.
bool is_file_of_model(const checkpoint::OutputTarget& target, const std::string& model) {
  if (model.empty()) return false;
  std::error_code error;
  const bool folder = fs::is_directory(model, error);
  if (!folder && same_file(target, model)) return true;
  const auto [begin, end] = gguf_part(fs::path(model).filename().string());
  if (!folder && begin.empty()) return false;
  const fs::path parent = fs::path(model).parent_path();
  const fs::path where = folder ? fs::path(model) : parent.empty() ? fs::path(".") : parent;
  for (fs::directory_iterator it(where, error), last; !error && it != last; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!folder && !(name.starts_with(begin) && name.ends_with(end))) continue;
    if (same_file(target, it->path().string())) return true;
  }
  return false;
}

// A file of such a name would change what the folder means to a reader of models.
bool has_name_of_model(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.ends_with(".json") || name.ends_with(".gguf") || name == "golden.safetensors" ||
         (name.ends_with(".safetensors") &&
          (name.starts_with("model") || name.starts_with("consolidated")));
}

bool lies_in_folder(const checkpoint::OutputTarget& target, const std::string& folder) {
  std::error_code error;
  const fs::path parent = fs::path(target.path).parent_path();
  return !folder.empty() && fs::is_directory(folder, error) &&
         fs::equivalent(parent.empty() ? fs::path(".") : parent, folder, error);
}

// Whether an existing file is an earlier result of the same verb.
bool is_own_result(const checkpoint::OutputTarget& target, ResultFile::Content content) {
  if (MOESAIC_FAULT(result_takes_any_file_for_its_own)) return true;
  if (content == ResultFile::Content::kLayerOutput) {
    const Result<checkpoint::SafetensorsFile> file =
        checkpoint::SafetensorsFile::open(target.path, FileAccess::kCopy);
    if (!file.ok()) return false;
    const auto& metadata = file->header().metadata();
    for (const auto& [key, value] : kMetadata) {
      const auto found = metadata.find(key);
      if (found == metadata.end() || found->second != value) return false;
    }
    return true;
  }
  std::array<char, 512> begin{};  // the mark is in the first line
  std::ifstream file(target.path, std::ios::binary);
  file.read(begin.data(), begin.size());
  const std::string_view text(begin.data(), static_cast<std::size_t>(file.gcount()));
  const std::string_view line = text.substr(0, text.find('\n'));
  return line.starts_with("<svg ") && line.find(kPlotMark) != std::string_view::npos;
}

Status refuse(const checkpoint::OutputTarget& target, std::string_view why) {
  return {StatusCode::kInvalidArgument, fmt::format("{}: {}", target.given, why)};
}

// Two descriptors that end in one pipe or file; a terminal shows both anyway.
bool share_a_place(int one, int other) {
  struct stat a {
  }, b{};
  return ::fstat(one, &a) == 0 && ::fstat(other, &b) == 0 && a.st_ino == b.st_ino &&
         a.st_dev == b.st_dev && (S_ISREG(a.st_mode) || S_ISFIFO(a.st_mode));
}

Status check_stream(const ResultFile& file, const checkpoint::OutputTarget& target) {
  if (target.descriptor == STDERR_FILENO) {
    return refuse(target, "stderr carries the messages, need another place");
  }
  if (target.descriptor == STDOUT_FILENO && share_a_place(STDOUT_FILENO, STDERR_FILENO)) {
    return refuse(target,
                  "stdout and stderr go to the same place, where the result would mix with "
                  "the messages; need two places");
  }
  const bool binary = file.content == ResultFile::Content::kLayerOutput;
  if (binary && !file.force && target.descriptor >= 0 && ::isatty(target.descriptor) != 0) {
    return refuse(target, "is a terminal, need a file or a pipe, or --force");
  }
  return {};
}

Status check_target(const ResultFile& file, const checkpoint::OutputTarget& target) {
  const bool regular = target.kind != checkpoint::OutputTarget::Kind::kNew && S_ISREG(target.mode);
  if (regular && !MOESAIC_FAULT(result_overwrites_inputs)) {
    for (const std::string& input : file.inputs) {
      if (same_file(target, input)) {
        return refuse(target, "is read by this command, need another file");
      }
    }
  }
  const bool reserved = has_name_of_model(target.path);
  const std::string of_model = fmt::format("is a file of the model {}, need another", file.model);
  if (target.kind == checkpoint::OutputTarget::Kind::kStream) {
    if (regular && is_file_of_model(target, file.model)) return refuse(target, of_model);
    return check_stream(file, target);
  }
  if (target.kind == checkpoint::OutputTarget::Kind::kNew) {
    if (!reserved || !lies_in_folder(target, file.model)) return {};
    return refuse(target, fmt::format("would become a file of the model {}, need another name or "
                                      "place",
                                      file.model));
  }
  struct stat out {};
  if (::fstat(STDOUT_FILENO, &out) == 0 && out.st_ino == target.inode &&
      out.st_dev == target.device) {
    return refuse(target, "is the file behind stdout, need another, or - for stdout");
  }
  const bool own = is_own_result(target, file.content);
  if (is_file_of_model(target, file.model) && (!own || reserved) &&
      !MOESAIC_FAULT(result_overwrites_the_model)) {
    return refuse(target, of_model);
  }
  if (own || file.force || target.bytes == 0) return {};
  return refuse(target,
                fmt::format("exists and is no result of '{}', need another name, or --force "
                            "to replace it",
                            verb_of(file.content)));
}

}  // namespace

bool goes_to_stdout(const ResultFile& file) {
  const std::string path = system_path(file);
  // A closed stdout is still what was asked for, whatever has its number now.
  if (path == "/dev/stdout" || path == "/dev/fd/1") return true;
  const Result<checkpoint::OutputTarget> target = checkpoint::find_output(path);
  return target.ok() && target->descriptor == STDOUT_FILENO;
}

Origin origin_of(const ResultFile& file) {
  return goes_to_stdout(file) ? Origin::kStdout : Origin::kOption;
}

Origin origin_of_refusal(const ResultFile& file, const Status& status) {
  return status.code() == StatusCode::kIo ? origin_of(file) : Origin::kOption;
}

Status check_result_file(const ResultFile& file) {
  const Result<checkpoint::OutputTarget> target = checkpoint::find_output(system_path(file));
  if (!target.ok()) return target.status().with_context(file.option);
  return check_target(file, *target).with_context(file.option);
}

Status write_result(const ResultFile& file, std::span<const NamedTensor> tensors) {
  MOESAIC_RETURN_IF_ERROR(check_result_file(file));
  return write_safetensors(system_path(file), tensors, kMetadata).with_context(file.option);
}

Status write_result(const ResultFile& file, std::string_view svg) {
  MOESAIC_RETURN_IF_ERROR(check_result_file(file));
  return checkpoint::write_output_text(system_path(file), svg).with_context(file.option);
}

}  // namespace moesaic::tool
