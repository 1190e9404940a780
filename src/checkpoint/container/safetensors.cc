// Opening a safetensors file.
#include "checkpoint/container/safetensors.h"

#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/container/guard.h"

namespace moesaic::checkpoint {

SafetensorsFile::SafetensorsFile(MappedFile file, SafetensorsHeader header)
    : TensorDataFile(std::move(file), header.data_offset()), header_(std::move(header)) {}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path, FileAccess access) {
  return guard_allocation(path, [&]() -> Result<SafetensorsFile> {
    MOESAIC_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path, access));
    std::array<std::byte, 8> first{};
    const std::size_t first_bytes = std::min<std::uint64_t>(first.size(), file.size());
    MOESAIC_RETURN_IF_ERROR(file.read_at(0, std::span(first).first(first_bytes)));
    MOESAIC_ASSIGN_OR_RETURN(
        const std::uint64_t n,
        safetensors_header_bytes(path, std::span(first).first(first_bytes), file.size()));
    // n is at most 10^8 and lies inside the file.
    std::string header(n, '\0');
    MOESAIC_RETURN_IF_ERROR(
        file.read_at(8, std::as_writable_bytes(std::span<char>(header.data(), header.size()))));
    MOESAIC_ASSIGN_OR_RETURN(SafetensorsHeader parsed,
                             parse_safetensors_header(path, header, file.size()));
    return SafetensorsFile(std::move(file), std::move(parsed));
  });
}

}  // namespace moesaic::checkpoint
