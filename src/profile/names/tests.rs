//! Names as tracers give them, of the libraries whose kernels run in a forward.

use super::*;

fn short(raw: &[&str]) -> Vec<String> {
    let names = Names::of(raw.iter().copied());
    raw.iter().map(|raw| names.short(raw).to_owned()).collect()
}

#[track_caller]
fn becomes(raw: &str, expected: &str) {
    assert_eq!(short(&[raw]), [expected]);
}

#[test]
fn plain_names_stay() {
    for name in [
        "qk_norm_rope_kvwrite_few",
        "gemv",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "linear [576, 1536]",
        "attention decode",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "",
    ] {
        becomes(name, name);
    }
}

#[test]
fn return_types_arguments_and_namespaces_go() {
    becomes(
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8::Params)",
        "Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>",
    );
    becomes(
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
        "vectorized_elementwise_kernel<4, CUDAFunctor_add, array>",
    );
    becomes(
        "void (anonymous namespace)::softmax_warp_forward<float, float, 8, false>(float*, float const*, int)",
        "softmax_warp_forward<float, float, 8, false>",
    );
    becomes(
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, float>(cublasGemvParamsEx<int>)",
        "kernel<int, int, __nv_bfloat16, __nv_bfloat16, float>",
    );
    becomes(
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)",
        "splitKreduce_kernel<32, 16, int, float>",
    );
    becomes("void f<(ns::Layout)1, (ns::Layout)-2>(int)", "f<1, -2>");
    becomes("void ns::apply<ns::f(int)::{lambda(float)#1}>(int)", "apply<{lambda(float)#1}>");
    becomes("ns::Functor::operator()(int) const", "operator()");
}

#[test]
fn mangled_names_are_read_first() {
    becomes(
        "_ZN8cublasLt19splitKreduce_kernelILi32ELi16EifEEvPKT2_",
        "splitKreduce_kernel<32, 16, int, float>",
    );
    becomes("_Z3addPfS_", "add");
    becomes("_Znonsense", "_Znonsense");
}

fn xmma(tile: u32, end: &str) -> String {
    format!(
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize{tile}x128x64_warpgroupsize1x1x1_execute_segment_k_{end}"
    )
}

#[test]
fn what_a_library_ends_all_names_with_goes() {
    becomes(
        &xmma(128, "off_kernel__5x_cublas"),
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
    );
    becomes("_kernel", "_kernel");
}

#[test]
fn a_long_name_loses_its_middle() {
    let raw = xmma(128, "on_and_more");
    let name = &short(&[&raw])[0];
    assert_eq!(name, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize…_execute_segment_k_on_and_more");
    assert!(name.chars().count() <= MAX_CHARS);
    assert_eq!(Names::of([raw.as_str()].into_iter()).full(&raw), raw);
}

#[test]
fn kernels_that_would_be_called_the_same_keep_more() {
    let (a, b) = (xmma(64, "on_and_more"), xmma(96, "on_and_more"));
    assert_eq!(short(&[&a, &b]), [a.as_str(), b.as_str()], "the tile is in the middle that is cut out");
    assert_eq!(
        short(&[
            "void ns::device_kernel<ns::GemmUniversal<ns::tuple<ns::C<1>>, 4>>(int)",
            "void ns::device_kernel<ns::GemmUniversal<ns::tuple<ns::C<2>>, 4>>(int)",
            "void ns::device_kernel<ns::GemmUniversal<ns::tuple<ns::C<2>>, 8>>(int)",
            "void ns::device_kernel<ns::Reduce<float>>(int)",
        ]),
        [
            "device_kernel<GemmUniversal<tuple<C<1>>, 4>>",
            "device_kernel<GemmUniversal<tuple<C<2>>, 4>>",
            "device_kernel<GemmUniversal<tuple, 8>>",
            "device_kernel<Reduce>",
        ]
    );
}

#[test]
fn no_two_are_ever_alike() {
    let overloads = ["void f<int>(int)", "void f<int>(float)", "void a::f<int>(int)", "int f<int>(int)"];
    let found = short(&overloads);
    assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), overloads.len(), "{found:?}");
    // A name that another one is shortened to.
    let found = short(&["f<int>", "void f<int>(int)"]);
    assert_ne!(found[0], found[1]);
}

#[test]
fn what_cannot_be_taken_apart_stays() {
    for odd in ["f<int", "a > b::c)", "<<<", "f(", "::", "operator", "void x<(y>(z))"] {
        let name = &short(&[odd])[0];
        assert!(!name.is_empty() && (odd.contains(name.as_str()) || name.as_str() == odd), "{odd}: {name}");
    }
}

proptest::proptest! {
    #[test]
    fn any_text_gets_a_name(texts in proptest::collection::btree_set("[a-c<>(){}:, _0-9*é-]{0,24}|_Z[A-Za-z0-9]{0,12}", 1..6)) {
        let raw: Vec<&str> = texts.iter().map(String::as_str).collect();
        let names = Names::of(raw.iter().copied());
        let full: BTreeSet<&str> = raw.iter().map(|raw| names.full(raw)).collect();
        let short: BTreeSet<&str> = raw.iter().map(|raw| names.short(raw)).collect();
        proptest::prop_assert_eq!(full.len(), short.len());
    }
}
