#include "text_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <system_error>

namespace moesaic::tool {
namespace {

constexpr std::size_t kMaxTextBytes = 64'000'000;  // parsed, some twenty times as much

}  // namespace

Result<std::string> read_text(const std::string& path) {
  const auto failure = [&](const char* what) {
    const StatusCode code = errno == ENOENT ? StatusCode::kNotFound : StatusCode::kIo;
    const std::error_code error(errno, std::generic_category());
    return Status(code, fmt::format("{}: cannot be {}: {}", path, what, error.message()));
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (!file) return failure("opened");
  std::string text;
  constexpr std::size_t kPiece = 1 << 16;
  for (std::size_t got = kPiece; got == kPiece;) {
    const std::size_t before = text.size();
    text.resize(before + kPiece);
    got = std::fread(text.data() + before, 1, kPiece, file.get());
    text.resize(before + got);
    if (text.size() > kMaxTextBytes) {
      return Status(
          StatusCode::kLimitExceeded,
          fmt::format("{}: got more than {} bytes of text, need fewer", path, kMaxTextBytes));
    }
  }
  if (std::ferror(file.get()) != 0) return failure("read");
  return text;
}

}  // namespace moesaic::tool
