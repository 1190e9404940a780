#include "checkpoint/container_support.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace moesaic::test {

TempDir::TempDir() {
  static std::atomic<int> counter{0};
  path_ = std::filesystem::temp_directory_path() /
          ("moesaic-test-" + std::to_string(::getpid()) + "-" + std::to_string(counter++));
  std::filesystem::create_directories(path_);
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TempDir::path(std::string_view name) const { return (path_ / name).string(); }

std::vector<std::string> TempDir::entries() const {
  std::vector<std::string> names;
  for (const auto& e : std::filesystem::directory_iterator(path_)) {
    names.push_back(e.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void write_bytes(const std::string& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::string read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string from_hex(std::string_view hex) {
  std::string digits;
  for (const char c : hex) {
    if (c != ' ') digits += c;
  }
  std::string out;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    out += static_cast<char>(std::strtol(digits.substr(i, 2).c_str(), nullptr, 16));
  }
  return out;
}

std::string container(std::string_view header, std::string_view data) {
  std::string file;
  for (unsigned i = 0; i < 8; ++i) {
    file += static_cast<char>(static_cast<std::uint64_t>(header.size()) >> (8 * i) & 0xFF);
  }
  return file.append(header).append(data);
}

std::string simple_file(const std::vector<std::string>& names) {
  std::string header = "{";
  std::string data;
  for (const std::string& name : names) {
    header += (data.empty() ? "\"" : ",\"") + name +
              R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + std::to_string(data.size()) +
              "," + std::to_string(data.size() + 1) + "]}";
    data += static_cast<char>(data.size() + 1);
  }
  return container(header + "}", data);
}

std::string mismatch(const Status& status, StatusCode code,
                     const std::vector<std::string>& keywords) {
  if (status.code() != code) {
    return "code: need " + std::string(status_code_name(code)) + ", got " + status.to_string();
  }
  for (const std::string& word : keywords) {
    if (status.message().find(word) == std::string::npos) {
      return "text: need '" + word + "' in " + status.to_string();
    }
  }
  return {};
}

}  // namespace moesaic::test
