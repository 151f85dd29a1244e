"""Names as profilers of vLLM and SGLang show them on NVIDIA's and AMD's GPUs and on CPUs, most from public threads.

Template arguments are shortened or made up here and there: the table goes by what stands before them.
"""

from __future__ import annotations

import pytest

from eyas.bench.kernels import LABELS, part_of

NAMES = {
    "attention": (
        "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(Flash_fwd_params)",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
        "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1>>>>>",
        "void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8>>",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<KernelTraits<(MaskMode)1, 16u, 1u>>",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u>",
        "fmhaSm100fKernel_QkvE4m3OBfloat16HQk576HV512HVPerCta256PagedKvDenseP64VarSeqQ16Kv128StaticSwapsAbForGen",
        "kernel_unified_attention_2d",
        "_fwd_grouped_kernel_stage1",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>",
        "void vllm::merge_attn_states_kernel<unsigned short, 128u>",
        "_C::cpu_attention_with_kv_cache",
        "vllm::unified_attention_with_output",
        "aten::scaled_dot_product_attention",
    ),
    "matmul": (
        "nvjet_tst_64x24_64x16_4x1_v_bz_splitK_bias_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_64x64_32x6_tn_align8>",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_warpgroupsize1x1x1",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEE",
        "cutlass::device_kernel<flashinfer::gemm::DeviceGemmFp4GemmSm100<128, 64, 128>>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>",
        "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float>>",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u, 64u, 128u, (deep_gemm::GemmType)0>",
        "void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8, true, 4, 2, false>",
        "_w8a8_block_fp8_matmul",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x256",
        "_C::onednn_mm",
        "aten::addmm",
        "aten::linear",
    ),
    "moe": (
        "fused_moe_kernel",
        "void vllm::moe::topkGatingSoftmax<4, 128, 4, 16, int>",
        "void vllm::moe::moe_align_block_size_kernel<int>",
        "void vllm::moe::count_and_sort_expert_tokens_kernel<int>",
        "bmm_E2m1_E2m1E2m1_Fp32_t128x8x512u2_s6_et128x8_m128x8x64_cga1x1x1_16dp256b_rM_TN_transOut_schedS_biasM_bN",
        "bmm_Bfloat16_E2m1E2m1_Fp32_t128x16x512_s5_et128x16_m128x16x64_cga1x1x1_16dp256b_rM_TN_transOut_schPd2x1x2x3",
        "void moe::dev::routing::routingIndicesClusterKernel<moe::dev::routing::routingDeepSeek::KernelParams>",
        "void tensorrt_llm::kernels::cutlass_kernels::finalizeKernelVecLoad",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 256u, 128u, (deep_gemm::GemmType)1>",
        "ck::moe_mxgemm<ck::GridwiseMoeGemmMX>",
        "void marlin_moe_wna16::Marlin<__nv_bfloat16, 256, 1, 8, 8>",
        "_C::cpu_fused_moe",
    ),
    "allreduce": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>",
        "void sglang::cross_device_reduce_2stage<__nv_bfloat16, 4>",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<__nv_bfloat16, 8, true>",
        "void flashinfer::trtllm_moe_allreduce_fusion::moefinalize_allreduce_fusion_kernel_oneshot_lamport",
        "void c10d::symmetric_memory::(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>",
        "two_shot_all_reduce_kernel_inplace",
        "c10d::allreduce_",
    ),
    "communication": (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "void deep_ep::internode_ll::dispatch<true, false, 7168>",
        "_allgather_base",
    ),
    "elementwise": (
        "void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*)",
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>)>",
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &(silu)>",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>",
        "void vllm::scaled_fp8_quant_kernel<c10::BFloat16>(c10::Float8_e4m3fn*)",
        "_static_quant_fp8",
        "void cvt_fp16_to_fp4<__nv_bfloat16, false>",
        "triton_red_fused__to_copy_add_mean_mm_mul_pow_rsqrt_0",
        "_C::rotary_embedding",
        "aten::mul",
        "aten::add_",
    ),
    "sampling": (
        "void at::native::sbtopk::gatherTopK<c10::BFloat16, unsigned int, 2, false>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>",
        "void flashinfer::sampling::TreeSpeculativeSamplingTargetOnly<512u>",
        "void VerifyTreeGreedy<long, long>",
        "rejection_greedy_sample_kernel",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<>",
        "_C::greedy_argmax",
        "aten::multinomial",
    ),
    "copies": (
        "Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
        "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 2>",
        "aten::copy_",
    ),
    "other": ("aten::view", "aten::empty", "my_very_own_kernel", ""),
}


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in NAMES.items() for name in names])
def test_named(part, name):
    assert part_of(name) == part


def test_every_part_has_a_label_and_a_name_of_its_own():
    assert set(NAMES) | {"idle"} == set(LABELS) and len(set(LABELS.values())) == len(LABELS)
