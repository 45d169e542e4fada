// torch.autocast on the simulated GPU: the operators that torch casts on every GPU.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){
#define CASTOR_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
    AT_FORALL_LOWER_PRECISION_FP(CASTOR_LOWER)
#undef CASTOR_LOWER
#define CASTOR_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
        AT_FORALL_FP32(CASTOR_FP32)
#undef CASTOR_FP32
#define CASTOR_FP32_OR_GIVEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
            AT_FORALL_FP32_SET_OPT_DTYPE(CASTOR_FP32_OR_GIVEN)
#undef CASTOR_FP32_OR_GIVEN
#define CASTOR_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
                AT_FORALL_PROMOTE(CASTOR_PROMOTE)
#undef CASTOR_PROMOTE
                    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(
                        KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace at::autocast
