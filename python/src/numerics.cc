#include "numerics.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <array>
#include <string>

#include "core/fault.h"
#include "moesaic/numerics.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct NumericsObject {
  NumericsSummary summary;
  double activation_bound = 0, bound = 0;
  nb::object row_errors, row_flags;
};

}  // namespace

nb::object numerics_of(const FusedMoE& layer, std::span<const RowNumerics> rows, DType output,
                       const TensorArg& x) {
  NumericsObject made;
  const std::array<std::int64_t, 1> dims = {static_cast<std::int64_t>(rows.size())};
  TensorView errors, flags;
  made.row_errors = x.like(DType::kF32, dims, &errors);
  made.row_flags = x.like(DType::kI32, dims, &flags);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    errors.as<float>()[i] = static_cast<float>(summarize(rows.subspan(i, 1)).error_estimate());
    flags.as<std::int32_t>()[i] = static_cast<std::int32_t>(rows[i].flags);
  }
  made.summary = summarize(rows);
  made.activation_bound = layer.activation_bound();
  made.bound = with_output_rounding(
      computed_bound(layer.quant().output_bound, made.activation_bound, made.summary),
      MOESAIC_FAULT(python_output_is_not_rounded) ? DType::kF32 : output);
  return nb::cast(std::move(made));
}

void bind_numerics(nb::module_& m) {
  const auto count = [](auto member) {
    return [member](const NumericsObject& n) { return n.summary.*member; };
  };
  nb::class_<NumericsObject> c(m, "Numerics",
                               "What rounding did to the rows of one call, and whether they are "
                               "those that the layer's bound is stated for.");
  c.def_prop_ro(
       "within", [](const NumericsObject& n) { return n.summary.within(n.activation_bound); },
       "No row is outside, and the estimated error is within activation_bound.")
      .def_ro("bound", &NumericsObject::bound,
              "Of the relative L2 error of this call's output: the layer's, or a wider one that "
              "follows from the estimate; infinity where there is none. Relative to the parts "
              "(experts times weights) that are added into it.")
      .def_ro("activation_bound", &NumericsObject::activation_bound,
              "The part of the layer's bound that is due to rounding activations.")
      .def_prop_ro(
          "error_estimate", [](const NumericsObject& n) { return n.summary.error_estimate(); },
          "Relative L2 error that rounding activations is estimated to leave, of all rows.")
      .def_prop_ro("rows", count(&NumericsSummary::rows))
      .def_prop_ro("outside", count(&NumericsSummary::outside), "Rows with any flag.")
      .def_prop_ro("saturated", count(&NumericsSummary::saturated),
                   "Rows with values outside what a static scale can express.")
      .def_prop_ro("flushed", count(&NumericsSummary::flushed),
                   "Rows that lost more below the smallest normal code than rounding takes.")
      .def_prop_ro("not_finite", count(&NumericsSummary::not_finite),
                   "Rows with NaN or infinity on their way.")
      .def_prop_ro("beyond_bound", count(&NumericsSummary::beyond_bound),
                   "Rows with an expert whose estimated error is above 1.5 times the bound.")
      .def_ro("row_errors", &NumericsObject::row_errors, "[M] F32: error_estimate of each row.",
              nb::sig("def row_errors(self, /) -> typing.Any"))
      .def_ro("row_flags", &NumericsObject::row_flags,
              "[M] I32: the sum of SATURATED, FLUSHED, NOT_FINITE, BEYOND_BOUND where they are so.",
              nb::sig("def row_flags(self, /) -> typing.Any"))
      .def("__repr__", [](const NumericsObject& n) {
        const NumericsSummary& s = n.summary;
        return fmt::format(
            "<moesaic.Numerics: {} of {} rows outside (saturated {}, flushed {}, not finite {}, "
            "beyond the bound {}), estimated error {:.1e} of {:.1e}, bound {:.1e}>",
            s.outside, s.rows, s.saturated, s.flushed, s.not_finite, s.beyond_bound,
            s.error_estimate(), n.activation_bound, n.bound);
      });
  const auto flag = [&c](const char* name, RowNumericsFlag value) {
    c.attr(name) = static_cast<std::int64_t>(value);
  };
  flag("SATURATED", kRowSaturated);
  flag("FLUSHED", kRowFlushed);
  flag("NOT_FINITE", kRowNotFinite);
  flag("BEYOND_BOUND", kRowBeyondBound);
}

}  // namespace moesaic::python
