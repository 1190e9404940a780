#include "callbacks.h"

#include <utility>

#include "core/fault.h"
#include "gil.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

class GuardedSource final : public ExpertSource {
 public:
  GuardedSource(std::unique_ptr<ExpertSource> source, CallGuard* guard)
      : source_(std::move(source)), guard_(guard) {}
  Result<ExpertWeightsView> expert(std::int64_t local_expert) override {
    if (guard_->stop()) return Status(StatusCode::kIo, "interrupted");
    return source_->expert(local_expert);
  }

 private:
  std::unique_ptr<ExpertSource> source_;
  CallGuard* guard_;
};

}  // namespace

ProgressFn CallGuard::progress() {
  if (progress_.is_none()) return {};
  return [this](std::int64_t done, std::int64_t total) {
    if (stopped_) return;
    const GilTaken gil;
    try {
      progress_(done, total);
    } catch (nb::python_error& error) {
      error.restore();
      stopped_ = !MOESAIC_FAULT(python_callback_error_lost);
    }
  };
}

bool CallGuard::stop() {
  if (stopped_) return true;
  const GilTaken gil;
  if (PyErr_CheckSignals() != 0 && !MOESAIC_FAULT(python_interrupt_ignored)) stopped_ = true;
  return stopped_;
}

std::unique_ptr<ExpertSource> CallGuard::guard(std::unique_ptr<ExpertSource> source) {
  if (!source) return source;
  return std::make_unique<GuardedSource>(std::move(source), this);
}

}  // namespace moesaic::python
