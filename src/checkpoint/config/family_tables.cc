// The table of families. Source: docs/spec/checkpoints.md section 3.
#include "checkpoint/config/families.h"
#include "checkpoint/config/family_rows_2026.h"
#include "checkpoint/config/family_rows_biased_sigmoid.h"
#include "checkpoint/config/family_rows_deepseek.h"
#include "checkpoint/config/family_rows_mixtral.h"
#include "checkpoint/config/family_rows_own.h"
#include "checkpoint/config/family_rows_transformers.h"

namespace moesaic::checkpoint {
namespace {

constexpr auto kFamilies = std::to_array<Family>({
    mixtral(),        qwen2_moe(),      qwen3_moe(),     qwen3_next(),     deepseek_v2(),
    deepseek_v3(),    kimi_k2(),        glm4_moe(),      dots1(),          minimax_m1(),
    minimax_m2(),     olmoe(),          gpt_oss(),       llama4(),         phimoe(),
    granite(),        granite_shared(), jamba(),         dbrx(),           hunyuan(),
    hunyuan_large(),  ernie45(),        step3(),         longcat(),        nemotron_h(),
    qwen3_vl_moe(),   qwen3_5_moe(),    glm4_moe_lite(), glm_moe_dsa(),    granite_hybrid(),
    flex_olmo(),      mellum(),         afmoe(),         axk1(),           axk2(),
    bailing_hybrid(), beam(),           dots3(),         exaone_moe(),     glm5_next(),
    hy_v3(),          laguna(),         lfm2_moe(),      minimax_m3(),     solar_open(),
    flint(),          cohere2_moe(),    aria(),          granite_swa(),    privacy_filter(),
    qwen3_omni_moe(), qwen4_exp(),      inkling2(),      mistral_large4(), deepseek_v4(),
    mistral4(),       kimi_linear(),    mimo_v2_flash(), step3p5(),        gemma4(),
    hy_v4(),          sarvam(),         lara_mini(),     deepseek_ocr2(),  unlimited_ocr(),
    deepseek_v32(),
});

}  // namespace

std::span<const Family> families() { return kFamilies; }

}  // namespace moesaic::checkpoint
