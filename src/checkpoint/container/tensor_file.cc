#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/safetensors.h"
#include "moesaic/checkpoint.h"

namespace moesaic {
namespace {

Status no_such_tensor(const std::string& path, const std::string& name,
                      std::span<const std::string_view> names) {
  constexpr std::size_t kMaxListed = 8;
  std::string list;
  for (const std::string_view known : names.first(std::min(names.size(), kMaxListed))) {
    list += (list.empty() ? "" : ", ") + checkpoint::quote_name(known);
  }
  if (names.size() > kMaxListed) list += fmt::format(", ... ({} in all)", names.size());
  const std::string nearest = checkpoint::similar_name(name, names);
  return {
      StatusCode::kNotFound,
      fmt::format("{}: no tensor {}, need one of {}{}", path, checkpoint::quote_name(name),
                  list.empty() ? "none: the file is empty" : list,
                  nearest.empty() ? "" : "; the nearest is " + checkpoint::quote_name(nearest))};
}

}  // namespace

struct TensorFile::Impl {
  checkpoint::SafetensorsFile file;
};

TensorFile::TensorFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TensorFile::TensorFile(TensorFile&&) noexcept = default;
TensorFile& TensorFile::operator=(TensorFile&&) noexcept = default;
TensorFile::~TensorFile() = default;

Result<TensorFile> TensorFile::open(const std::string& path, FileAccess access) {
  return checkpoint::guard_allocation(path, [&]() -> Result<TensorFile> {
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::SafetensorsFile file,
                             checkpoint::SafetensorsFile::open(path, access));
    return TensorFile(std::unique_ptr<Impl>(new Impl{std::move(file)}));
  });
}

std::vector<std::string> TensorFile::names() const {
  std::vector<std::string> names;
  names.reserve(impl_->file.tensors().size());
  for (const checkpoint::TensorInfo& info : impl_->file.tensors()) names.push_back(info.name);
  return names;
}

bool TensorFile::contains(const std::string& name) const {
  return impl_->file.find(name) != nullptr;
}

Result<Tensor> TensorFile::read(const std::string& name) const {
  return checkpoint::guard_allocation(impl_->file.path(), [&]() -> Result<Tensor> {
    const checkpoint::TensorInfo* info = impl_->file.find(name);
    if (info != nullptr) return impl_->file.read_tensor(*info);
    std::vector<std::string_view> names;
    names.reserve(impl_->file.tensors().size());
    for (const checkpoint::TensorInfo& t : impl_->file.tensors()) names.push_back(t.name);
    return no_such_tensor(impl_->file.path(), name, names);
  });
}

}  // namespace moesaic
