// Where results go: a file that appears whole or not at all, or a stream (device, pipe) that is
// written through. Which files may be replaced is for the caller to decide.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

// What a path names at this moment, symbolic links followed.
struct OutputTarget {
  enum class Kind : std::uint8_t {
    kNew,     // nothing is there yet
    kFile,    // a regular file, which would be replaced
    kStream,  // a character device, a pipe, or an open descriptor of this process
  };
  Kind kind = Kind::kNew;
  std::string given;    // as the caller wrote it, for messages
  std::string path;     // of the file itself, behind all links
  int descriptor = -1;  // kStream: /dev/stdout is 1, /dev/fd/3 is 3; -1: opened by its name
  // Identity and size of what exists; 0 for kNew.
  std::uint64_t device = 0, inode = 0, bytes = 0;
  mode_t mode = 0;
  uid_t owner = 0;
  gid_t group = 0;
};

// Looks, and changes nothing. kIo names what stands in the way: a folder, a socket, a block device
// (a disk is never meant), a file or a folder that may not be written, links that go in circles.
// kInvalidArgument: an empty path or one with a NUL.
Result<OutputTarget> find_output(const std::string& path);

// The file being written. A new or regular file has no name until commit() gives it one beside its
// destination and renames it: a failure, and the end of the process before it, leaves nothing
// behind and an older file intact. (Where the file system has no files without names, it has the
// temporary name from the start, which a process that is killed leaves; where it gives them none later,
// commit() copies the bytes.) Links to the destination
// stay links; permissions and, where the system allows it, the owner of a replaced file are kept;
// its other hard links keep the old content. A stream gets the bytes as they come.
class OutputFile {
 public:
  static Result<OutputFile> create(OutputTarget target);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  Status write(const void* data, std::uint64_t bytes);
  // Data on the disk, then the name, then the folder: after a crash there is the old file or the
  // new. For a stream: closes what was opened.
  Status commit();

 private:
  OutputFile() = default;
  Status system_error(std::string_view what, int error) const;
  bool create_unnamed();
  // make(name) < 0: errno says why not.
  template <class Make>
  Status give_name(std::string_view what, Make&& make);
  Status create_temporary();
  void take_permissions();
  // The bytes so far in a file that has a name, which is the file from then on.
  Status copy_to_named();

  OutputTarget target_;
  std::string temporary_;  // its name for now; empty: none yet, or none any more
  int fd_ = -1;
};

// find_output, create, write and commit of a text.
Status write_output_text(const std::string& path, std::string_view text);

}  // namespace moesaic::checkpoint
