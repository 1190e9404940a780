// Where a conversion writes: which folder may be taken, the temporary name under which it grows,
// and what killed runs left there.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

// The report that every result holds; "files" in it are the names of all its files.
inline constexpr const char* kConversionRecord = "moesaic_conversion.json";
// Lies in a folder while it is written, locked by the process that writes.
inline constexpr const char* kConversionMark = ".moesaic-converting";

struct ConvertDestination {
  std::string path;    // links resolved, no slash at the end
  bool force = false;  // whatever files are there may go
};

// A file's name as the record holds it: text, or where it is no UTF-8 {"bytes": "666f6fff"}. Back:
// empty for anything else.
nlohmann::ordered_json recorded_name(const std::string& name);
std::string name_of_record(const nlohmann::json& recorded);

// Checks that the folder `to` may become a conversion of the folder `from`: a name that does not
// exist, an empty folder, or a result of convert without other files, which is replaced; with
// `force` any folder. Never: the model's folder, one inside it, one that holds the model or
// files that its links lead to, one that holds the current folder, a mount point. kInvalidArgument,
// kNotFound (no parent folder), kIo (a parent that cannot be written to).
Result<ConvertDestination> check_destination(const std::string& from, const std::string& to,
                                             bool force);

// Removes the folders "<path>.tmp-<process>" that killed conversions left beside `path`, and says
// so in `notes`. A folder goes only if its process is gone, nobody holds its mark, and it is
// recognisably a conversion's: it has the mark, or is empty, or is a whole result. Others are
// named.
void remove_leftovers(const std::string& path, std::vector<std::string>* notes);

// The bytes of a file that was written, to the disk. kIo.
Status flush_to_disk(const std::string& path);

// A folder under a temporary name beside its destination; removed unless commit() succeeded.
class TemporaryFolder {
 public:
  // kIo.
  static Result<TemporaryFolder> create(const ConvertDestination& destination);
  TemporaryFolder(TemporaryFolder&& other) noexcept;
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder();

  std::string file(std::string_view name) const;
  // Sorted names of what lies in it, without the mark.
  Result<std::vector<std::string>> files() const;
  // Gives it the destination's name in one step, which is then on the disk as well; a folder that is
  // replaced goes afterwards.
  // kInvalidArgument when files that are not a conversion's appeared there meanwhile, kIo.
  Status commit();

 private:
  TemporaryFolder() = default;
  ConvertDestination destination_;
  std::string temporary_;
  int mark_ = -1;  // file descriptor that holds the lock
};

}  // namespace moesaic::checkpoint
