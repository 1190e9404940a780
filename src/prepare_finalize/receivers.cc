// The asynchronous forms of a PrepareAndFinalize that has none of its own.
#include <new>
#include <utility>

#include "moesaic/modular_kernel.h"

namespace moesaic {
namespace {

class ReadyRows final : public PrepareReceiver {
 public:
  explicit ReadyRows(Prepared prepared) : prepared_(prepared) {}
  Result<Prepared> receive() override { return prepared_; }

 private:
  Prepared prepared_;
};

class ReadyResult final : public FinalizeReceiver {
 public:
  Status receive() override { return {}; }
};

Status no_memory() { return {StatusCode::kOutOfMemory, "cannot allocate a receiver"}; }

}  // namespace

Result<std::unique_ptr<PrepareReceiver>> PrepareAndFinalize::prepare_async(
    const PrepareArgs& args) const {
  MOESAIC_ASSIGN_OR_RETURN(const Prepared prepared, prepare(args));
  std::unique_ptr<PrepareReceiver> ready(new (std::nothrow) ReadyRows(prepared));
  if (!ready) return withdraw(no_memory(), true, args.workspace);
  return ready;
}

Result<std::unique_ptr<FinalizeReceiver>> PrepareAndFinalize::finalize_async(
    const FinalizeArgs& args) const {
  MOESAIC_RETURN_IF_ERROR(finalize(args));
  std::unique_ptr<FinalizeReceiver> ready(new (std::nothrow) ReadyResult);
  if (!ready) return no_memory();
  return ready;
}

}  // namespace moesaic
