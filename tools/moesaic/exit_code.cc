#include "exit_code.h"

namespace moesaic::tool {

ExitCode exit_code(StatusCode code, Origin origin) {
  const ExitCode blamed = origin == Origin::kFile     ? kExitBadInput
                          : origin == Origin::kOption ? kExitUsage
                                                      : kExitDevice;
  switch (code) {
    case StatusCode::kOk:
      return kExitOk;
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
    case StatusCode::kIo:
    case StatusCode::kLimitExceeded:
      return blamed;
    // Shapes, layouts and dtypes are never typed on the command line: they come out of files.
    case StatusCode::kInvalidShape:
    case StatusCode::kInvalidLayout:
    case StatusCode::kInvalidDType:
    case StatusCode::kAmbiguousFormat:
    case StatusCode::kCorruptFile:
    case StatusCode::kMissingTensor:
      return kExitBadInput;
    case StatusCode::kUnsupported:
      return kExitUnsupported;
    case StatusCode::kOutOfMemory:
    case StatusCode::kDevice:
      return kExitDevice;
    // The tool sizes its own buffers, so these two are our mistakes.
    case StatusCode::kAliasing:
    case StatusCode::kWorkspaceTooSmall:
    case StatusCode::kInternal:
      return kExitInternal;
  }
  return kExitInternal;
}

const char* next_step(StatusCode code, Origin origin) {
  switch (code) {
    case StatusCode::kOk:
      return "nothing to do";
    case StatusCode::kInvalidArgument:
    case StatusCode::kLimitExceeded:
      return origin == Origin::kFile
                 ? "the file asks for something outside the limits; docs/limits.md lists them"
                 : "correct the option; 'moesaic VERB --help' shows the legal values";
    case StatusCode::kNotFound:
      return origin == Origin::kFile ? "check the path and the tensor name; 'moesaic inspect DIR' "
                                       "shows what a checkpoint holds"
                                     : "choose one of the names in the message";
    case StatusCode::kIo:
      if (origin == Origin::kStdout) return "check the disk or pipe behind stdout";
      return "check that the path exists and that you may read (or write) it";
    case StatusCode::kInvalidShape:
    case StatusCode::kInvalidLayout:
    case StatusCode::kInvalidDType:
      return "give a tensor of the shape and dtype that the message asks for";
    case StatusCode::kAmbiguousFormat:
      return "state which reading is meant in config.json; the library does not guess";
    case StatusCode::kCorruptFile:
      return "the file is damaged or was written wrongly: fetch it again, or write it again with a "
             "conforming writer";
    case StatusCode::kMissingTensor:
      return "fetch all shards of the checkpoint; a partial layer is never run";
    case StatusCode::kUnsupported:
      if (origin == Origin::kFile)
        return "docs/limits.md lists the models and formats that are read";
      return "'moesaic explain' shows what this build can do and why it refuses the rest";
    case StatusCode::kOutOfMemory:
      return "use fewer tokens, a smaller layer or a machine with more memory";
    case StatusCode::kDevice:
      return "'moesaic env' shows which devices are usable and why";
    case StatusCode::kAliasing:
    case StatusCode::kWorkspaceTooSmall:
    case StatusCode::kInternal:
      return "this is a bug: please report the command and this message";
  }
  return "please report the command and this message";
}

}  // namespace moesaic::tool
