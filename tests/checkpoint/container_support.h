// Making safetensors files and folders for the container tests.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic::test {

// A folder of its own under the system's temporary folder, removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string path(std::string_view name = {}) const;
  // Names of all entries, sorted.
  std::vector<std::string> entries() const;

 private:
  std::filesystem::path path_;
};

void write_bytes(const std::string& path, std::string_view bytes);
std::string read_bytes(const std::string& path);
// "38 b8 7e 00" -> 4 bytes.
std::string from_hex(std::string_view hex);
// 8 length bytes, the header as given (no padding added), the data.
std::string container(std::string_view header, std::string_view data);
// A file with one U8 tensor of one byte per name, contents 1, 2, 3 ...
std::string simple_file(const std::vector<std::string>& names);

// gtest helper: the code matches and the text contains every keyword; the text otherwise.
std::string mismatch(const Status& status, StatusCode code,
                     const std::vector<std::string>& keywords);

}  // namespace moesaic::test
